// The table of one instruction set. [Note: no shared inline functions] in core/isa.h.
#include "core/isa.h"
#include "kernels/copy.h"

namespace ds::DS_ISA {

extern const Kernels table;
const Kernels table = {
    .copy = copy,
};

}  // namespace ds::DS_ISA

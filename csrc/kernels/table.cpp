// The table of one instruction set. [Note: no shared inline functions] in core/isa.h.
#include "core/isa.h"
#include "kernels/copy.h"
#include "kernels/squares.h"
#include "kernels/step.h"
#include "kernels/quant.h"

namespace ds::DS_ISA {

extern const Kernels table;
const Kernels table = {
    .copy = copy,
    .step = step,
    .squares = squares,
    .span_of = quant::span_of,
    .quantize = quant::quantize,
    .dequantize = quant::dequantize,
};

}  // namespace ds::DS_ISA

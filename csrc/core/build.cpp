// What this library was made of and by; the build hands the texts over.
#include "native.h"

const char* ds_compiler(void) {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "gcc " __VERSION__;
#endif
}

const char* ds_operators(void) { return DS_OPERATORS; }

const char* ds_flags(void) { return DS_FLAGS; }

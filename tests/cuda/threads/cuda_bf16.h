#include "cuda_runtime.h" /* bfloat16 is in ../decoders/numbers.h */

#include "cuda_runtime.h" /* halves are in ../decoders/numbers.h */

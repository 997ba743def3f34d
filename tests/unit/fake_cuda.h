/* fake_cuda.h - what fake_cuda.c remembers of its last calls. */
#ifndef KVANT_TESTS_FAKE_CUDA_H
#define KVANT_TESTS_FAKE_CUDA_H

#include <stdio.h>

#include "../../src/device/cuda_table.h"

typedef struct fake_calls {
    kvant_code_kind kind;
    const kvant_cuda_codec *codec;
    unsigned char arguments[512]; /* a copy, zeros behind it */
    kvant_cuda_stream stream;
    int freed;
    size_t shared_limit;
} fake_calls;

typedef const fake_calls *fake_cuda_calls_fn(void);

#endif

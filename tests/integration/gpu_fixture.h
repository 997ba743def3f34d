/* gpu_fixture.h - a prompt, and the steps of decoding after it, for the tests of devices of a
 * llama.cpp with CUDA. */
#ifndef KVANT_TESTS_GPU_FIXTURE_H
#define KVANT_TESTS_GPU_FIXTURE_H

#include "harness.h"
#include "mock_control.h"

enum { N_PROMPT = 150, N_STEPS = 40 };

static llama_token
    tokens[N_PROMPT + N_STEPS]; /* N_PROMPT: more tokens than the shorter prompts of any test */

static inline int start(void **state)
{
    int status;

    harness_need_gpu();
    status = harness_start(state);
    if (status == 0)
        harness_tokens(tokens, N_PROMPT + N_STEPS);
    return status;
}

#endif

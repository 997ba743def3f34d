/* problem_cases.h - cases of attention over sequences of different lengths. */
#ifndef KVANT_TESTS_PROBLEM_CASES_H
#define KVANT_TESTS_PROBLEM_CASES_H

#include "attention_fixture.h"

#include "../unit/specs.h"

static const int32_t lengths[] = { 1, 0, 64, 63, 65, 200, -3, 300, 7, 129 };

static inline attention_case case_of(const char *k, const char *v, uint32_t head_dim,
                                     uint32_t n_kv_heads, uint32_t n_heads, uint32_t open)
{
    return (attention_case){ k,       v,         head_dim, n_kv_heads, n_heads, 10, KVANT_CUDA_F32,
                             lengths, open == 3, 0.5f,     open };
}

#endif

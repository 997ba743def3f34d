/* attend.h - attention over tensors whose rows came from fuzzed bytes. */
#pragma once

#include <kvant/attention.h>

#include <stdbool.h>
#include <stdlib.h>

enum { FUZZ_MOST_WIDTH = 64 };

/* One query of each of two heads, over the first n_tokens rows. False: it was refused. */
static inline bool fuzz_attend(const kvant_tensor *keys, const kvant_tensor *values,
                               uint32_t n_tokens, uint32_t head_dim)
{
    float q[FUZZ_MOST_WIDTH] = { 1, -1, 0.5f }, out[FUZZ_MOST_WIDTH];
    size_t bytes;
    const kvant_attention_problem problem = { .size = sizeof problem,
                                              .n_queries = 1,
                                              .n_tokens = n_tokens,
                                              .n_heads = 2,
                                              .n_threads = 1,
                                              .q = q,
                                              .q_head_stride = head_dim,
                                              .out = out,
                                              .out_head_stride = head_dim,
                                              .scale = 0.25f,
                                              .causal = true };
    if (head_dim > FUZZ_MOST_WIDTH / 2 ||
        kvant_attention_workspace(keys, values, &problem, &bytes) != KVANT_OK)
        return false;
    void *workspace = aligned_alloc(64, (bytes + 63) / 64 * 64);
    const bool done =
        workspace && kvant_attention(keys, values, &problem, workspace, bytes) == KVANT_OK;
    free(workspace);
    return done;
}

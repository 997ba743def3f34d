/* turn.h - RoPE as transform=first knows it (kvant_rope). */
#pragma once

#include "tensor.h"

/* One allocation. */
typedef struct kvant_turn {
    uint32_t n_dims, interleaved, n_positions, n_ranges;
    float frequencies[KVANT_MAX_HEAD_DIM / 2];
} kvant_turn;

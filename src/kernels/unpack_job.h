/* unpack_job.h - arguments of unpacking a page's codes to a tile. */
#pragma once

#include "kernels.h"

typedef struct unpack_job {
    const kvant_layout *layout;
    const uint32_t *words;
    const float *values; /* NULL: a number is code + offset */
    float offset;
    float *tile;
    size_t stride;
} unpack_job;

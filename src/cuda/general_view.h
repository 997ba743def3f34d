/* general_view.h - a codec in the general form, as it is passed to a launch. */
#pragma once

#include "../codec/view.h"

#ifndef KVANT_PAPERS /* 0: without the kernels that only families of papers need (papers/) */
#define KVANT_PAPERS 1
#endif

typedef struct kvant_general {
    kvant_general_view view;
    uint32_t head_dim, keys, metadata; /* metadata: bytes of the page */
    uint32_t head_stride; /* distance between the tables of two kv heads; 0: all share one */
    uint32_t halves;      /* offset of numbers as fp16 for attention (papers/halves.h); 0: none */
    const float *tables;  /* the numbers that the view's places refer to, on the device */
} kvant_general;

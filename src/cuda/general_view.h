/* general_view.h - a codec in the general form, as it travels into a launch. */
#pragma once

#include "../codec/view.h"

typedef struct kvant_general {
    kvant_general_view view;
    uint32_t head_dim, keys, metadata; /* metadata: bytes of the page */
    uint32_t head_stride; /* from a kv head's tables to the next one's, 0: one for all */
    uint32_t halves;      /* a place: numbers as fp16 for attention (any/halves.h), 0: none */
    const float *tables;  /* that the view's places are in, on the device */
} kvant_general;

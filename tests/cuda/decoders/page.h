/* page.h - a page of a codec for test_decoders.cpp, and what the CPU decodes of it. */
#pragma once

#include "../../../src/cuda/general_view.h"
#include "../../../src/cuda/params.h"

KVANT_BEGIN_C

typedef struct test_page {
    const kvant_codec_view *view;
    struct kvant_cuda_codec gpu; /* as libkvant_cuda has it, without tables */
    kvant_general general;
    kvant_cuda_params params; /* what decoders of codebooks and trellises read */
    const float *values;      /* of a codebook */
    uint16_t levels[64];      /* of a trellis: whole numbers as halves */
    uint8_t *page;
    uint32_t bytes; /* of it, codes and metadata */
    float *rows;    /* 64 transformed ones */
    void *tables;
    kvant_codec *codec;
} test_page;

/* False: no such codec. */
bool test_page_make(const char *spec, uint32_t head_dim, kvant_role role, test_page *to);
void test_page_free(test_page *page);

KVANT_END_C

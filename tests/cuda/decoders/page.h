/* page.h - a page of a codec for test_decoders.cpp, and the rows that the CPU decodes from it. */
#pragma once

#include "../../../src/cuda/general_view.h"
#include "../../../src/cuda/params.h"

KVANT_BEGIN_C

typedef struct test_page {
    const kvant_codec_view *view;
    struct kvant_cuda_codec gpu; /* the codec as libkvant_cuda has it, without tables */
    kvant_general general;
    kvant_cuda_params params; /* the parameters that decoders of codebooks and trellises read */
    const float *values;      /* levels of a codebook */
    uint16_t levels[64];      /* levels of a trellis: whole numbers as halves */
    uint8_t *page;
    uint32_t bytes; /* size of the page's codes and metadata */
    float *rows;    /* 64 transformed rows */
    void *tables;
    kvant_codec *codec;
} test_page;

/* Returns false if there is no such codec. */
bool test_page_make(const char *spec, uint32_t head_dim, kvant_role role, test_page *to);
void test_page_free(test_page *page);

KVANT_END_C

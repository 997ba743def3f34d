/* records.h - vectors as a codec of codec.h encodes them, for codecs that have no kernel here
 * (octopus, QJL and others).
 *
 * A row is cut into parts of at most KVANT_MAX_HEAD_DIM numbers. Each part is encoded as the first
 * token of an empty page. The record consists of the bits that belong to this token, scales
 * included. To find these bits, a row is encoded into a page of zeros and into a page of ones. */
#pragma once

#include "../codec/codec_internal.h"

typedef struct kvant_record_part {
    kvant_codec *codec;
    uint32_t *bits; /* the numbers of the first token's bits in a page */
    size_t n_bits;
} kvant_record_part;

typedef struct kvant_records {
    uint32_t dim, n_parts;
    kvant_record_part sizes[2]; /* for parts of dim / n_parts numbers, and of one number more */
    size_t bytes;               /* of a record */
    bool unbiased; /* the factor makes inner products right on average; false: the codec does */
} kvant_records;

/* spec: a codec. Its rotation is not applied, because the index rotates rows. KVANT_ERR_SPEC,
 * KVANT_ERR_UNSUPPORTED, KVANT_ERR_MEMORY. */
kvant_status kvant_records_create(const char *spec, uint32_t dim, kvant_records **records,
                                  const kvant_error *error);
void kvant_records_destroy(kvant_records **records);

/* The bytes of a page, which the functions below need as scratch, aligned to 64. */
size_t kvant_records_page(const kvant_records *records);

/* Encodes a row of variance 1. */
void kvant_records_encode(const kvant_records *records, const kvant_kernels *kernels,
                          const float *y, uint8_t *page, uint8_t *record);

/* Writes the levels of a record's dim numbers plus 128 and returns their step. y: scratch of dim
 * numbers. */
float kvant_records_decode(const kvant_records *records, const kvant_kernels *kernels,
                           const uint8_t *record, uint8_t *page, float *y, uint8_t *levels);

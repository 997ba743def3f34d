/* records.h - vectors as any codec of codec.h encodes them, for codecs without a kernel of their own
 * here (octopus, QJL, ...).
 *
 * A row is cut into parts of at most KVANT_MAX_HEAD_DIM numbers. A part is encoded as the first token
 * of an empty page, and the bits that belong to this token are the record, scales included. Which
 * bits these are shows when a row is encoded into a page of zeros and into a page of ones. */
#pragma once

#include "../codec/codec_internal.h"

typedef struct kvant_record_part {
    kvant_codec *codec;
    uint32_t *bits; /* of the first token in a page, n_bits of them */
    size_t n_bits;
} kvant_record_part;

typedef struct kvant_records {
    uint32_t dim, n_parts;
    kvant_record_part sizes[2]; /* parts of dim / n_parts numbers, and of one more */
    size_t bytes;               /* of a record */
    bool unbiased; /* the factor makes inner products right on average; else it keeps the codec's */
} kvant_records;

/* spec: of a codec without its rotation, which is not done. KVANT_ERR_SPEC, KVANT_ERR_UNSUPPORTED,
 * KVANT_ERR_MEMORY. */
kvant_status kvant_records_create(const char *spec, uint32_t dim, kvant_records **records,
                                  const kvant_error *error);
void kvant_records_destroy(kvant_records **records);

/* Of the scratch of the functions below, a page, aligned to 64. */
size_t kvant_records_page(const kvant_records *records);

/* Of a row of variance 1. */
void kvant_records_encode(const kvant_records *records, const kvant_kernels *kernels,
                          const float *y, uint8_t *page, uint8_t *record);

/* Levels plus 128 of a record's dim numbers; returns their step. y: scratch of dim numbers. */
float kvant_records_decode(const kvant_records *records, const kvant_kernels *kernels,
                           const uint8_t *record, uint8_t *page, float *y, uint8_t *levels);

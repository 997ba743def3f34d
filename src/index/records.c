/* records.c - see records.h. */
#include "records.h"

#include <string.h>

#include "../base/alloc.h"
#include "../base/half.h"
#include "../base/random.h"

static uint32_t part_start(const kvant_records *records, uint32_t part)
{
    return (uint32_t)((uint64_t)records->dim * part / records->n_parts);
}

static const kvant_record_part *part_of(const kvant_records *records, uint32_t n)
{
    return &records->sizes[n - records->dim / records->n_parts];
}

/* ---- Making ---- */

/* Finds the bits of a token: they are the same whatever the page held before the row was
 * encoded. */
static kvant_status find_bits(kvant_record_part *part)
{
    const size_t bytes = part->codec->info.page_bytes;
    uint8_t *zeros = kvant_alloc(2, bytes), *ones = zeros + bytes;
    float y[KVANT_MAX_HEAD_DIM];
    uint64_t seed = 1;
    KVANT_RETURN_IF(!zeros, KVANT_ERR_MEMORY);
    for (uint32_t i = 0; i < KVANT_MAX_HEAD_DIM; i++)
        y[i] = kvant_splitmix64(&seed) % 2 ? 1.0f : -1.0f;
    memset(ones, 0xff, bytes);
    part->codec->quantizer->encode(part->codec, kvant_kernels_get(KVANT_CPU_C), y, 0, zeros);
    part->codec->quantizer->encode(part->codec, kvant_kernels_get(KVANT_CPU_C), y, 0, ones);
    part->bits = kvant_alloc(8 * bytes, sizeof *part->bits);
    for (size_t i = 0; part->bits && i < 8 * bytes; i++)
        if (!((zeros[i / 8] ^ ones[i / 8]) >> i % 8 & 1))
            part->bits[part->n_bits++] = (uint32_t)i;
    kvant_free(zeros);
    return part->bits ? KVANT_OK : KVANT_ERR_MEMORY;
}

static kvant_status make_part(const char *spec, uint32_t n, kvant_record_part *part,
                              const kvant_error *error)
{
    const kvant_location site = { .seed = 0 };
    KVANT_FORWARD(kvant_codec_create_at(spec, n, KVANT_ROLE_K, &site, &part->codec, error));
    if (part->codec->info.block_tokens != 1)
        return kvant_fail(
            error, KVANT_ERR_UNSUPPORTED,
            "%s encodes several rows together, which an index does not support: use another codec",
            part->codec->spec);
    if (find_bits(part) != KVANT_OK)
        return kvant_fail(error, KVANT_ERR_MEMORY, "out of memory for an index");
    return KVANT_OK;
}

kvant_status kvant_records_create(const char *spec, uint32_t dim, kvant_records **records,
                                  const kvant_error *error)
{
    kvant_records *made = *records = kvant_alloc(1, sizeof *made);
    size_t bits = 0;
    if (!made)
        return kvant_fail(error, KVANT_ERR_MEMORY, "out of memory for an index");
    made->dim = dim;
    made->n_parts = (dim + KVANT_MAX_HEAD_DIM - 1) / KVANT_MAX_HEAD_DIM;
    made->unbiased = !strstr(spec, "qjl") && !strstr(spec, "scale=norm");
    for (uint32_t part = 0; part < made->n_parts; part++) {
        const uint32_t n = part_start(made, part + 1) - part_start(made, part);
        kvant_record_part *size = &made->sizes[n - dim / made->n_parts];
        if (!size->codec)
            KVANT_FORWARD(make_part(spec, n, size, error));
        bits += size->n_bits;
    }
    made->bytes = (bits + 7) / 8;
    return KVANT_OK;
}

void kvant_records_destroy(kvant_records **records)
{
    for (int i = 0; *records && i < 2; i++) {
        kvant_codec_free(&(*records)->sizes[i].codec);
        kvant_free((*records)->sizes[i].bits);
    }
    kvant_free(*records);
    *records = NULL;
}

/* ---- Rows ---- */

size_t kvant_records_page(const kvant_records *records)
{
    size_t most = 0;
    for (int i = 0; i < 2; i++)
        if (records->sizes[i].codec && records->sizes[i].codec->info.page_bytes > most)
            most = records->sizes[i].codec->info.page_bytes;
    return most;
}

static void set_bit(uint8_t *bytes, size_t at, uint32_t bit)
{
    bytes[at / 8] = (uint8_t)((bytes[at / 8] & ~(1u << at % 8)) | bit << at % 8);
}

static uint32_t get_bit(const uint8_t *bytes, size_t at)
{
    return (uint32_t)bytes[at / 8] >> at % 8 & 1u;
}

void kvant_records_encode(const kvant_records *records, const kvant_kernels *kernels,
                          const float *y, uint8_t *page, uint8_t *record)
{
    size_t at = 0;
    for (uint32_t i = 0; i < records->n_parts; i++) {
        const uint32_t first = part_start(records, i);
        const kvant_record_part *part = part_of(records, part_start(records, i + 1) - first);
        part->codec->quantizer->encode(part->codec, kernels, y + first, 0, page);
        for (size_t bit = 0; bit < part->n_bits; bit++)
            set_bit(record, at++, get_bit(page, part->bits[bit]));
    }
}

float kvant_records_decode(const kvant_records *records, const kvant_kernels *kernels,
                           const uint8_t *record, uint8_t *page, float *y, uint8_t *levels)
{
    size_t at = 0;
    for (uint32_t i = 0; i < records->n_parts; i++) {
        const uint32_t first = part_start(records, i);
        const kvant_record_part *part = part_of(records, part_start(records, i + 1) - first);
        for (size_t bit = 0; bit < part->n_bits; bit++)
            set_bit(page, part->bits[bit], get_bit(record, at++));
        part->codec->quantizer->decode(part->codec, kernels, page, 0, y + first);
    }
    const float largest = kvant_float_from_bits(kernels->magnitude(y, records->dim));
    const bool usable =
        largest > 0x1p-100f && largest < 0x1p100f; /* a damaged file may hold any scale */
    const kvant_uniform_step step = {
        .inverse = usable ? 127 / largest : 0, .low = -127, .high = 127, .offset = -128
    };
    memset(levels, 128, records->dim);
    if (usable)
        kernels->uniform_codes(y, records->dim, &step, levels);
    return usable ? largest / 127 : 0;
}

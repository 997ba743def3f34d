/* book.c - see book.h. */
#include "book.h"

#include <math.h>
#include <string.h>

#include "../base/alloc.h"
#include "../base/half.h"

const kvant_book_name kvant_book_names[4] = {
    { "turboquant", 1, 8 }, { "rabitq", 1, 7 }, { "int", 2, 8 }, { "trellis", 2, 4 }
};

/* The positive levels. The negative levels mirror them. */
static const struct {
    float step;
    uint8_t levels[64];
} books[8] = {
    [1] = { 0.79788456f, { 1 } },
    [2] = { 0.15104176f, { 3, 10 } },
    [3] = { 0.08309821f, { 3, 9, 16, 26 } },
    [4] = { 0.04479655f, { 3, 9, 15, 21, 28, 36, 46, 61 } },
    [5] = { 0.03375f, { 2, 6, 10, 14, 18, 22, 26, 31, 36, 41, 47, 53, 60, 69, 80, 97 } },
    [6] = { 0.03525f, { 1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                        33, 35, 38, 41, 44, 47, 50, 53, 57, 61, 65, 70, 76, 83, 92, 106 } },
    [7] = { 0.03575f, { 1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,  16,
                        17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,  32,
                        33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 45, 47, 49, 51,  53,
                        55, 57, 59, 61, 63, 65, 68, 71, 74, 77, 81, 85, 90, 96, 104, 117 } },
};

/* Half the distance between evenly spaced levels, for the smallest error (Max 1960, table II). */
static const float grid_steps[8] = { 0,       0.7979f, 0.4979f, 0.2930f,
                                     0.1676f, 0.0941f, 0.0520f, 0.0285f };

#define WHOLE_STEP 0.03125f /* turboquant-8: 127 levels reach 4 */

static void fill_even(kvant_book *book, uint32_t bits)
{
    const int32_t half = 1 << (bits - 1);
    book->step = WHOLE_STEP;
    book->format.bias = (uint8_t)half;
    for (int32_t code = 0; code < 2 * half; code++)
        book->values[code] = (float)(code - half);
}

static void fill_symmetric(kvant_book *book, uint32_t bits)
{
    const uint32_t half = 1u << (bits - 1);
    const bool grid = book->kind == KVANT_BOOK_RABITQ;
    book->step = grid ? grid_steps[bits] : books[bits].step;
    for (uint32_t i = 0; i < half; i++) {
        book->values[half + i] = grid ? (float)(2 * i + 1) : books[bits].levels[i];
        book->values[half - 1 - i] = -book->values[half + i];
    }
    for (uint32_t i = 0; i + 1 < 2 * half; i++)
        book->thresholds[i] = (book->values[i] + book->values[i + 1]) / 2;
    book->format.bias = (uint8_t)book->values[2 * half - 1];
}

static kvant_status fill_trellis(kvant_book *book, uint32_t bits)
{
    kvant_layout layout;
    book->trellis = kvant_alloc(1, sizeof *book->trellis);
    KVANT_RETURN_IF(!book->trellis, KVANT_ERR_MEMORY);
    kvant_layout_init(&layout, KVANT_ROLE_K, KVANT_MAX_HEAD_DIM, bits);
    kvant_trellis_book_init(book->trellis, &layout);
    book->step = book->trellis->unit;
    book->value_bits = bits + 2;
    for (uint32_t i = 0; i < 4u << bits; i++)
        book->values[i] = book->trellis->trellis.levels[i];
    return KVANT_OK;
}

kvant_status kvant_book_create(kvant_book *book, kvant_book_kind kind, uint32_t bits, uint32_t dim)
{
    const uint32_t padded =
        kind == KVANT_BOOK_TRELLIS && dim < 16 ? 16 : dim; /* a path needs more steps than memory */
    *book = (kvant_book){ .kind = kind,
                          .format = { .bits = bits, .n_quads = kvant_pack_quads(padded, bits) },
                          .value_bits = bits };
    if (kind == KVANT_BOOK_TRELLIS)
        KVANT_FORWARD(fill_trellis(book, bits));
    else if (kind == KVANT_BOOK_INT || bits == 8)
        fill_even(book, bits);
    else
        fill_symmetric(book, bits);
    for (uint32_t code = 0; kind != KVANT_BOOK_TRELLIS && bits <= 4 && code < 1u << bits; code++)
        book->format.levels[code] = (int8_t)book->values[code];
    book->levels = book->format;
    if (kind == KVANT_BOOK_TRELLIS || (bits > 4 && bits < 8))
        book->levels =
            (kvant_pack_format){ .bits = 8, .n_quads = book->format.n_quads, .bias = 128 };
    return KVANT_OK;
}

kvant_status kvant_book_create_records(kvant_book *book, const char *spec, uint32_t dim,
                                       const kvant_error *error)
{
    *book = (kvant_book){ .kind = KVANT_BOOK_RECORDS };
    book->levels =
        (kvant_pack_format){ .bits = 8, .n_quads = kvant_pack_quads(dim, 8), .bias = 128 };
    return kvant_records_create(spec, dim, &book->records, error);
}

void kvant_book_destroy(kvant_book *book)
{
    kvant_free(book->trellis);
    kvant_records_destroy(&book->records);
    book->trellis = NULL;
}

static size_t padded(uint32_t n)
{
    return ((size_t)n + KVANT_PACK_CHUNK - 1) / KVANT_PACK_CHUNK * KVANT_PACK_CHUNK;
}

/* The scratch holds codes and indices of levels; for records it holds levels, a row and a page. */
size_t kvant_book_scratch(const kvant_book *book, uint32_t n)
{
    return book->records ? 5 * padded(n) + kvant_records_page(book->records) : 2 * padded(n);
}

/* ---- Encoding ---- */

/* Rounds y to even levels with magnitudes up to `most`. */
static void encode_even(const kvant_book *book, const kvant_kernels *kernels, const float *y,
                        uint32_t n, float inverse, uint8_t *codes)
{
    const float half = (float)(1 << (book->format.bits - 1));
    const kvant_uniform_step step = {
        .inverse = inverse, .low = 1 - half, .high = half - 1, .offset = -half
    };
    kernels->uniform_codes(y, n, &step, codes);
}

/* Codes are rounded with this many factors, from 0.68 to 1.32 of the usual one. */
#define GRID_TRIALS 33

/* Finds the point of the grid with the smallest angle to y, among the points that the trials
 * meet. */
static void encode_grid(const kvant_book *book, const kvant_kernels *kernels, const float *y,
                        uint32_t n, float inverse, uint8_t *codes)
{
    double most = 0;
    uint32_t best = GRID_TRIALS / 2;
    for (uint32_t trial = 0; book->format.bits > 1 && trial <= GRID_TRIALS; trial++) {
        const uint32_t at = trial < GRID_TRIALS ? trial : best; /* the last repeats the best */
        const float factor = 1 + 0.02f * ((float)at - GRID_TRIALS / 2);
        kernels->codebook_codes(y, n, inverse * factor, book->thresholds, book->format.bits, codes);
        const double product = kernels->dot_codes(y, codes, n, book->values, book->value_bits);
        double squares = 0;
        for (uint32_t i = 0; i < n; i++)
            squares += (double)book->values[codes[i]] * book->values[codes[i]];
        if (product * product / squares > most) {
            most = product * product / squares;
            best = at;
        }
    }
    if (book->format.bits == 1)
        kernels->codebook_codes(y, n, inverse, book->thresholds, 1, codes);
}

static void encode_trellis(const kvant_book *book, const kvant_kernels *kernels, const float *y,
                           uint32_t n, float inverse, uint8_t *codes, uint8_t *at)
{
    const kvant_pack_format *format = &book->format;
    uint16_t steps[KVANT_TRELLIS_MAX_STEPS];
    for (uint32_t circle = 0; circle < kvant_pack_circles(format); circle++) {
        const uint32_t first = kvant_pack_circle(format, circle),
                       quads = kvant_pack_circle(format, circle + 1) - first;
        const uint32_t left = n - 4 * first, numbers = left < 4 * quads ? left : 4 * quads;
        for (uint32_t i = 0; i < numbers; i++)
            steps[i] = (uint16_t)kvant_pack_step(format->bits, quads, i);
        kvant_trellis_quantize(&book->trellis->trellis, kernels, y + 4 * first, inverse, numbers,
                               steps, 4 * quads, codes + 4 * first, at + 4 * first);
    }
}

float kvant_book_encode(const kvant_book *book, const kvant_kernels *kernels, const float *y,
                        uint32_t n, uint8_t *codes, uint8_t *at)
{
    const float squared = kernels->dot(y, y, n);
    if (!(squared > 0)) {
        memset(codes, 0, n);
        return 0;
    }
    const float inverse =
        sqrtf((float)n) / (sqrtf(squared) * (book->kind == KVANT_BOOK_TRELLIS ? 1 : book->step));
    if (book->kind == KVANT_BOOK_TRELLIS)
        encode_trellis(book, kernels, y, n, inverse, codes, at);
    else if (book->kind == KVANT_BOOK_INT)
        encode_even(book, kernels, y, n,
                    (float)((1 << (book->format.bits - 1)) - 1) /
                        kvant_float_from_bits(kernels->magnitude(y, n)),
                    codes);
    else if (book->format.bits == 8)
        encode_even(book, kernels, y, n, inverse, codes);
    else if (book->kind == KVANT_BOOK_RABITQ)
        encode_grid(book, kernels, y, n, inverse, codes);
    else
        kernels->codebook_codes(y, n, inverse, book->thresholds, book->format.bits, codes);
    const uint8_t *indices = book->kind == KVANT_BOOK_TRELLIS ? at : codes;
    return squared / kernels->dot_codes(y, indices, n, book->values, book->value_bits);
}

/* ---- Packs ---- */

/* A codec's scales neither overflow nor lose bits, because the parts have a variance of about 1. */
static float store_record(const kvant_book *book, const kvant_kernels *kernels, const float *y,
                          uint32_t n, uint8_t *record, uint8_t *scratch)
{
    float *row = (float *)(void *)(scratch + padded(n));
    uint8_t *page = scratch + 5 * padded(n);
    const float squared = kernels->dot(y, y, n), deviation = sqrtf(squared) / sqrtf((float)n);
    memset(record, 0, book->records->bytes);
    if (!(deviation > 0))
        return 0;
    for (uint32_t i = 0; i < n; i++)
        row[i] = y[i] / deviation;
    kvant_records_encode(book->records, kernels, row, page, record);
    const float step = kvant_records_decode(book->records, kernels, record, page, row, scratch);
    if (!book->records->unbiased)
        return deviation * step;
    double product = 0;
    for (uint32_t i = 0; i < n; i++)
        product += (double)y[i] * (scratch[i] - 128);
    return product > 0 ? (float)(squared / product) : 0;
}

float kvant_book_store(const kvant_book *book, const kvant_kernels *kernels, const float *y,
                       uint32_t n, uint8_t *pack, uint32_t v, uint8_t *scratch)
{
    if (book->records)
        return store_record(book, kernels, y, n, pack + v * book->records->bytes, scratch);
    memset(scratch, 0, padded(n)); /* also clears the rest of the last quad */
    const float factor = kvant_book_encode(book, kernels, y, n, scratch, scratch + padded(n));
    for (uint32_t quad = 0; 4 * quad < n; quad++)
        kvant_pack_put_quad(book->format.bits, pack, quad, v, scratch + 4 * (size_t)quad);
    return factor;
}

void kvant_book_copy(const kvant_book *book, const uint8_t *from, uint32_t from_v, uint8_t *pack,
                     uint32_t v)
{
    const size_t bytes = book->records ? book->records->bytes : 0;
    if (from)
        memmove(pack + v * bytes, from + from_v * bytes, bytes);
    else
        memset(pack + v * bytes, 0, bytes);
    for (uint32_t quad = 0; quad < book->format.n_quads; quad++) {
        uint8_t four[4] = { 0 };
        for (uint32_t j = 0; from && j < 4; j++)
            four[j] = (uint8_t)kvant_pack_get(book->format.bits, from, 4 * quad + j, from_v);
        kvant_pack_put_quad(book->format.bits, pack, quad, v, four);
    }
}

/* Decodes the codes of 16 vectors in a quad. */
static void decode_plane(const kvant_book *book, const uint8_t *codes, uint32_t quad, uint32_t half,
                         uint8_t *levels)
{
    uint8_t plane[KVANT_PACK_CHUNK] = { 0 };
    for (kvant_pack_part part = { 0 };
         kvant_pack_next(book->format.bits, 4 * quad, 16 * half, &part);)
        for (uint32_t i = 0; i < KVANT_PACK_CHUNK; i++)
            plane[i] |= (uint8_t)((codes[part.byte + i] >> part.shift & ((1u << part.bits) - 1))
                                  << part.done);
    for (uint32_t i = 0; i < KVANT_PACK_CHUNK; i++)
        levels[i] = (uint8_t)(128 + (int32_t)book->values[plane[i]]);
}

static void decode_records(const kvant_book *book, const kvant_kernels *kernels,
                           const uint8_t *pack, uint8_t *levels, uint8_t *scratch)
{
    const uint32_t n = book->records->dim;
    memset(levels, 128, kvant_pack_bytes(&book->levels));
    for (uint32_t v = 0; v < KVANT_PACK_VECTORS; v++) {
        kvant_records_decode(book->records, kernels, pack + v * book->records->bytes,
                             scratch + 5 * padded(n), (float *)(void *)(scratch + padded(n)),
                             scratch);
        for (uint32_t quad = 0; 4 * quad < n; quad++)
            kvant_pack_put_quad(8, levels, quad, v, scratch + 4 * (size_t)quad);
    }
}

void kvant_book_decode(const kvant_book *book, const kvant_kernels *kernels, const uint8_t *pack,
                       uint8_t *levels, uint8_t *scratch)
{
    if (book->records)
        decode_records(book, kernels, pack, levels, scratch);
    else if (book->kind == KVANT_BOOK_TRELLIS)
        kernels->trellis_pack(&book->trellis->trellis, &book->format, pack, levels);
    else
        for (uint32_t i = 0; i < 2 * book->format.n_quads; i++)
            decode_plane(book, pack, i / 2, i % 2, levels + (size_t)i * KVANT_PACK_CHUNK);
}

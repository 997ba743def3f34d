/* book.h - the codes of an index: levels are small integers, so that products are exact.
 *
 * A row y becomes codes, and a factor that makes inner products right on average: <u, y> is estimated
 * by factor <u, levels>, which is exact for u = y. Levels of turboquant come within 0.8 % of the
 * smallest mean squared error of a normal number (Lloyd-Max), at 6 and 7 bits within 2 and 11 %: they
 * are the integers for which a search over all steps found the smallest error. */
#pragma once

#include "../codec/trellis_book.h"
#include "../kernels/kernels.h"
#include "records.h"

typedef enum kvant_book_kind {
    KVANT_BOOK_TURBOQUANT,
    KVANT_BOOK_RABITQ,
    KVANT_BOOK_INT,
    KVANT_BOOK_TRELLIS,
    KVANT_BOOK_RECORDS /* any other codec; a pack is 32 records */
} kvant_book_kind;

typedef struct kvant_book {
    kvant_book_kind kind;
    kvant_pack_format format; /* of codes; bits are 0 with records */
    kvant_pack_format
        levels; /* what products read: format, or where no kernel reads it packs of 8 bits */
    uint32_t value_bits;   /* of an index of values */
    float step;            /* of levels, for numbers of variance 1 */
    float thresholds[128]; /* between levels, in steps; none of INT, TRELLIS and at 8 bits */
    float values[256];     /* levels of codes, of TRELLIS in ascending order */
    kvant_trellis_book *trellis;
    kvant_records *records;
} kvant_book;

/* Names of kinds, and the bits that they take. */
typedef struct kvant_book_name {
    const char *name;
    uint32_t least, most;
} kvant_book_name;
extern const kvant_book_name kvant_book_names[4]; /* by kind */

/* memory: log2 of the states of a trellis. KVANT_ERR_MEMORY. */
kvant_status kvant_book_create(kvant_book *book, kvant_book_kind kind, uint32_t bits,
                               uint32_t memory, uint32_t dim);
kvant_status kvant_book_create_records(kvant_book *book, const char *spec, uint32_t dim,
                                       const kvant_error *error);
void kvant_book_destroy(kvant_book *book);

/* Whether levels are not codes. */
static inline bool kvant_book_is_decoded(const kvant_book *book)
{
    return book->levels.bits != book->format.bits;
}

static inline size_t kvant_book_pack_bytes(const kvant_book *book)
{
    return book->records ? KVANT_PACK_VECTORS * book->records->bytes
                         : kvant_pack_bytes(&book->format);
}

/* Of the scratch of kvant_book_store and _decode for n dimensions, aligned to 64. */
size_t kvant_book_scratch(const kvant_book *book, uint32_t n);

/* Codes of y, n numbers; at: their indices of values. Returns the factor; 0 for zeros. Not of records. */
float kvant_book_encode(const kvant_book *book, const kvant_kernels *kernels, const float *y,
                        uint32_t n, uint8_t *codes, uint8_t *at);

/* Encodes y as vector v of a pack; returns the factor. */
float kvant_book_store(const kvant_book *book, const kvant_kernels *kernels, const float *y,
                       uint32_t n, uint8_t *pack, uint32_t v, uint8_t *scratch);

/* Vector v = that of another pack; NULL: zeros. */
void kvant_book_copy(const kvant_book *book, const uint8_t *from, uint32_t from_v, uint8_t *pack,
                     uint32_t v);

/* Levels plus 128 of a pack, as a pack of 8 bits; packs are aligned to 64, except records. */
void kvant_book_decode(const kvant_book *book, const kvant_kernels *kernels, const uint8_t *pack,
                       uint8_t *levels, uint8_t *scratch);

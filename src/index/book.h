/* book.h - the codes of an index. Levels are small integers, so that products are exact.
 *
 * A row y becomes codes and a factor. <u, y> is estimated by factor <u, levels>, which is right on
 * average and exact for u = y. The levels of turboquant are the integers for which a search over
 * all steps found the smallest error. Their mean squared error for normal numbers is within 0.8 %
 * of the smallest possible error (Lloyd-Max). At 6 bits it is within 2 %. At 7 bits it is within 11
 * %. */
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
    /* The format that products read: `format`, or packs of 8 bits if no kernel reads `format`. */
    kvant_pack_format levels;
    uint32_t value_bits;   /* bits of an index into `values` */
    float step;            /* of levels, for numbers of variance 1 */
    float thresholds[128]; /* between levels, in steps; unused by INT, TRELLIS and at 8 bits */
    float values[256];     /* levels of codes; of TRELLIS in ascending order */
    kvant_trellis_book *trellis;
    kvant_records *records;
} kvant_book;

/* The name of a kind, and the bits that it accepts. */
typedef struct kvant_book_name {
    const char *name;
    uint32_t least, most;
} kvant_book_name;
extern const kvant_book_name kvant_book_names[4]; /* by kind */

/* Creates a book. KVANT_ERR_MEMORY. */
kvant_status kvant_book_create(kvant_book *book, kvant_book_kind kind, uint32_t bits, uint32_t dim);
kvant_status kvant_book_create_records(kvant_book *book, const char *spec, uint32_t dim,
                                       const kvant_error *error);
void kvant_book_destroy(kvant_book *book);

/* Whether codes must be decoded to levels before products read them. */
static inline bool kvant_book_is_decoded(const kvant_book *book)
{
    return book->levels.bits != book->format.bits;
}

static inline size_t kvant_book_pack_bytes(const kvant_book *book)
{
    return book->records ? KVANT_PACK_VECTORS * book->records->bytes
                         : kvant_pack_bytes(&book->format);
}

/* Bytes of scratch that kvant_book_store and kvant_book_decode need for n dimensions. The scratch
 * is aligned to 64. */
size_t kvant_book_scratch(const kvant_book *book, uint32_t n);

/* Encodes y, n numbers, as codes. at: the codes' indices of `values`. Returns the factor; 0 for
 * zeros. Not for records. */
float kvant_book_encode(const kvant_book *book, const kvant_kernels *kernels, const float *y,
                        uint32_t n, uint8_t *codes, uint8_t *at);

/* Encodes y as vector v of a pack; returns the factor. */
float kvant_book_store(const kvant_book *book, const kvant_kernels *kernels, const float *y,
                       uint32_t n, uint8_t *pack, uint32_t v, uint8_t *scratch);

/* Copies vector from_v of another pack to vector v. from NULL: vector v becomes zeros. */
void kvant_book_copy(const kvant_book *book, const uint8_t *from, uint32_t from_v, uint8_t *pack,
                     uint32_t v);

/* Writes the levels of a pack plus 128 as a pack of 8 bits. Packs are aligned to 64, except
 * records. */
void kvant_book_decode(const kvant_book *book, const kvant_kernels *kernels, const uint8_t *pack,
                       uint8_t *levels, uint8_t *scratch);

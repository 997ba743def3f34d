/* packs.h - the codes of a pack, which are 32 vectors of a vector index, as kernels read them
 * (format.md, "Packs").
 *
 * A plane holds codes of 16 vectors in 4 dimensions: byte 4 v + j of a plane is dimension j of
 * vector v. Plane 2i + h belongs to the four dimensions from 4i of the 16 vectors from 16h. A chunk
 * of 64 bytes holds 8 / bits planes; the first plane has the low bits of each byte. So a vector of
 * chunks unpacks with shifts and a byte look-up, and every 32-bit lane sums one vector: no sum is
 * ever folded. Codes of any other number of bits lie in parts of 4, 2 and 1 bits. The widest part
 * comes first and holds the lowest bits. Parts alternate every 16 dimensions (8 dimensions with 6
 * bits). */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVANT_PACK_VECTORS 32u
#define KVANT_PACK_CHUNK 64u

typedef struct kvant_pack_format {
    uint32_t bits;    /* 1 to 8; kernels for products exist for 1, 2, 3, 4 and 8 */
    uint32_t n_quads; /* dimensions / 4, padded so that chunks are full (kvant_pack_quads) */
    /* the level of each code % 2^bits; unused at 8 bits, where the level is code - 128 */
    int8_t levels[16];
    uint8_t bias; /* The largest level, so that level + bias is never negative; 128 at 8 bits. */
} kvant_pack_format;

/* The queries of one call, interleaved: the four dimensions from 4 * i of query j are at x[(i * n +
 * j) * 4]. */
typedef struct kvant_pack_queries {
    /* -127 .. 127, aligned to 4; n_quads * n * 4 numbers, with zeros for padding */
    const int8_t *x;
    const int32_t *sums; /* for each query, the sum of its integers */
    uint32_t n;
} kvant_pack_queries;

/* The quads of one step: of a chunk or, for codes in parts, of one chunk per part and bit. */
static inline uint32_t kvant_pack_step_quads(uint32_t bits)
{
    return bits == 8 ? 1 : bits % 2 ? 4 : bits % 4 ? 2 : 1;
}

/* The quads of `dim` dimensions, rounded up to whole steps. */
static inline uint32_t kvant_pack_quads(uint32_t dim, uint32_t bits)
{
    const uint32_t quads = kvant_pack_step_quads(bits);
    return (dim + 4 * quads - 1) / (4 * quads) * quads;
}

static inline size_t kvant_pack_bytes(const kvant_pack_format *format)
{
    return (size_t)format->n_quads * 16 * format->bits;
}

/* One part of the code of dimension `dim` of vector `v`: its place and its bits. */
typedef struct kvant_pack_part {
    uint32_t bits, done; /* bits of this part, and of the parts before it */
    size_t byte;
    uint32_t shift;
} kvant_pack_part;

/* Goes to the next part; `part` is all zeros before the first. False behind the last part. */
static inline bool kvant_pack_next(uint32_t bits, uint32_t dim, uint32_t v, kvant_pack_part *part)
{
    const uint32_t quads = kvant_pack_step_quads(bits), left = bits - (part->done += part->bits);
    if (!left)
        return false;
    part->bits = left == 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    const uint32_t planes = 8 / part->bits, plane = dim / 4 % quads * 2 + v / 16;
    const size_t chunk = ((size_t)dim / 4 / quads * bits + part->done) * quads / 4 + plane / planes;
    part->byte = chunk * KVANT_PACK_CHUNK + v % 16 * 4 + dim % 4;
    part->shift = plane % planes * part->bits;
    return true;
}

static inline uint32_t kvant_pack_get(uint32_t bits, const uint8_t *codes, uint32_t dim, uint32_t v)
{
    uint32_t code = 0;
    for (kvant_pack_part part = { 0 }; kvant_pack_next(bits, dim, v, &part);)
        code |= (codes[part.byte] >> part.shift & ((1u << part.bits) - 1)) << part.done;
    return code;
}

/* Writes the codes of the 4 dimensions of a quad. */
static inline void kvant_pack_put_quad(uint32_t bits, uint8_t *codes, uint32_t quad, uint32_t v,
                                       const uint8_t four[4])
{
    for (kvant_pack_part part = { 0 }; kvant_pack_next(bits, 4 * quad, v, &part);) {
        const uint32_t mask = (1u << part.bits) - 1;
        for (uint32_t j = 0; j < 4; j++)
            codes[part.byte + j] = (uint8_t)((codes[part.byte + j] & ~(mask << part.shift)) |
                                             (four[j] >> part.done & mask) << part.shift);
    }
}

/* Trellis codes of a pack are circles of at most 512 steps (128 quads), one after another and of
 * nearly equal length. Circle i begins at quad kvant_pack_circle(format, i). */
#define KVANT_PACK_CIRCLE_QUADS 128u

static inline uint32_t kvant_pack_circles(const kvant_pack_format *format)
{
    return (format->n_quads + KVANT_PACK_CIRCLE_QUADS - 1) / KVANT_PACK_CIRCLE_QUADS;
}

static inline uint32_t kvant_pack_circle(const kvant_pack_format *format, uint32_t i)
{
    const uint32_t quads = kvant_pack_step_quads(format->bits);
    return format->n_quads / quads * i / kvant_pack_circles(format) * quads;
}

/* The step of dimension `dim` of a circle. The codes that a step depends on lie in the same bits of
 * the chunks before it. */
static inline uint32_t kvant_pack_step(uint32_t bits, uint32_t circle_quads, uint32_t dim)
{
    const uint32_t quad = dim / 4;
    return bits == 4 ? dim % 4 * circle_quads + quad
                     : (dim % 4 * 2 + quad % 2) * (circle_quads / 2) + quad / 2;
}

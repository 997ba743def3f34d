/* packs.h - codes of 32 vectors of an index, as kernels read them (format.md, "Index").
 *
 * A plane holds codes of 16 vectors in 4 dimensions: byte 4 v + j of a plane is dimension j of
 * vector v. Plane 2 i + h belongs to dimensions 4 i .. 4 i + 3 of vectors 16 h .. 16 h + 15. A chunk
 * of 64 bytes holds 8 / bits planes one above the other, the first in the low bits. So a vector of
 * chunks unpacks with shifts and a byte look-up, and every 32-bit lane sums one vector: no sum is
 * ever folded. At 3 bits, 16 dimensions are two chunks of low 2 bits and a chunk of high bits. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define KVANT_PACK_VECTORS 32u
#define KVANT_PACK_CHUNK 64u

typedef struct kvant_pack_format {
    uint32_t bits;     /* 1, 2, 3, 4 or 8 */
    uint32_t n_quads;  /* dimensions / 4, padded so that chunks are full: kvant_pack_quads */
    int8_t levels[16]; /* of code % 2^bits; none at 8 bits, where the level is code - 128 */
    uint8_t bias;      /* level + bias is from 0 to 2 bias: the largest level; 128 at 8 bits */
} kvant_pack_format;

/* Queries of one call, interleaved: dimensions 4 i .. 4 i + 3 of query j at x[(i * n + j) * 4]. */
typedef struct kvant_pack_queries {
    const int8_t *x;     /* -127 .. 127, aligned to 4; n_quads * n * 4 of them, zeros for padding */
    const int32_t *sums; /* of query j: the sum of its integers */
    uint32_t n;
} kvant_pack_queries;

/* Quads of `dim` dimensions. */
static inline uint32_t kvant_pack_quads(uint32_t dim, uint32_t bits)
{
    const uint32_t whole = bits == 3 ? 4 : bits < 4 ? 4 / bits : 1; /* of a chunk, or of three */
    return (dim + 4 * whole - 1) / (4 * whole) * whole;
}

static inline size_t kvant_pack_bytes(const kvant_pack_format *format)
{
    return (size_t)format->n_quads * 16 * format->bits;
}

/* Where a code of 1, 2, 4 or 8 bits is, of dimension `dim` of vector `v`. */
typedef struct kvant_pack_place {
    size_t byte;
    uint32_t shift;
} kvant_pack_place;

static inline kvant_pack_place kvant_pack_place_of(uint32_t bits, uint32_t dim, uint32_t v)
{
    const uint32_t planes = 8 / bits, plane = dim / 4 * 2 + v / 16;
    const size_t chunk = plane / planes;
    return (kvant_pack_place){ chunk * KVANT_PACK_CHUNK + v % 16 * 4 + dim % 4, plane % planes * bits };
}

/* The two places of a 3-bit code. */
static inline kvant_pack_place kvant_pack_low_place(uint32_t dim, uint32_t v)
{
    kvant_pack_place place = kvant_pack_place_of(2, dim % 16, v);
    place.byte += (size_t)(dim / 16) * 3 * KVANT_PACK_CHUNK;
    return place;
}

static inline kvant_pack_place kvant_pack_high_place(uint32_t dim, uint32_t v)
{
    kvant_pack_place place = kvant_pack_place_of(1, dim % 16, v);
    place.byte += ((size_t)(dim / 16) * 3 + 2) * KVANT_PACK_CHUNK;
    return place;
}

static inline uint32_t kvant_pack_bits_at(const uint8_t *codes, kvant_pack_place place, uint32_t bits)
{
    return codes[place.byte] >> place.shift & ((1u << bits) - 1);
}

static inline void kvant_pack_set_bits(uint8_t *codes, kvant_pack_place place, uint32_t bits, uint32_t code)
{
    const uint32_t mask = ((1u << bits) - 1) << place.shift;
    codes[place.byte] = (uint8_t)((codes[place.byte] & ~mask) | code << place.shift);
}

static inline uint32_t kvant_pack_get(uint32_t bits, const uint8_t *codes, uint32_t dim, uint32_t v)
{
    return bits == 3 ? kvant_pack_bits_at(codes, kvant_pack_low_place(dim, v), 2) |
                           kvant_pack_bits_at(codes, kvant_pack_high_place(dim, v), 1) << 2
                     : kvant_pack_bits_at(codes, kvant_pack_place_of(bits, dim, v), bits);
}

static inline void kvant_pack_put(uint32_t bits, uint8_t *codes, uint32_t dim, uint32_t v, uint32_t code)
{
    if (bits == 3) {
        kvant_pack_set_bits(codes, kvant_pack_low_place(dim, v), 2, code & 3);
        kvant_pack_set_bits(codes, kvant_pack_high_place(dim, v), 1, code >> 2);
    } else {
        kvant_pack_set_bits(codes, kvant_pack_place_of(bits, dim, v), bits, code);
    }
}

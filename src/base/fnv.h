/* fnv.h - 64-bit FNV-1a, and a faster sum of its kind, for checksums of files.
 *
 * Every step is a bijection of the state. So inputs of equal length that differ in one byte always
 * have different checksums; other inputs collide with probability 2^-64. FNV-1a detects damage, not
 * attacks. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KVANT_FNV_START 0xcbf29ce484222325u /* as FNV-1a defines it */

/* The state after n more bytes; state is KVANT_FNV_START in the beginning. */
static inline uint64_t kvant_fnv1a(uint64_t state, const void *bytes, size_t n)
{
    const unsigned char *at = bytes;
    for (size_t i = 0; i < n; i++)
        state = (state ^ at[i]) * 0x100000001b3u;
    return state;
}

/* The same with words of 8 bytes in place of bytes, which is 8 times as fast; n is a multiple of 8.
 * Inputs of equal length that differ in one word always have different checksums. */
static inline uint64_t kvant_fnv1a_words(uint64_t state, const void *bytes, size_t n)
{
    const unsigned char *at = bytes;
    uint64_t word;
    for (size_t i = 0; i < n; i += sizeof word) {
        memcpy(&word, at + i, sizeof word);
        state = (state ^ word) * 0x100000001b3u;
    }
    return state;
}

/* A checksum of many bytes: four sums of FNV's kind at once, each of every fourth word of 8 bytes.
 * A multiplication takes several cycles, so four independent ones are as fast as the memory, and a
 * single one is not. Unlike FNV-1a, every bit of a sum influences all others: changes of two words
 * do not cancel each other. Little endian, as all of kvant. */
#define KVANT_CHECKSUM_LANES 4u
#define KVANT_CHECKSUM_STRIPE (KVANT_CHECKSUM_LANES * sizeof(uint64_t))

typedef struct kvant_checksum {
    uint64_t lanes[KVANT_CHECKSUM_LANES];
    uint64_t n;                                /* bytes so far */
    unsigned char rest[KVANT_CHECKSUM_STRIPE]; /* the last ones, which make no stripe yet */
} kvant_checksum;

static inline uint64_t kvant_checksum_step(uint64_t state, uint64_t word)
{
    state = (state ^ word) * 0x100000001b3u;
    return state ^ state >> 32;
}

static inline void kvant_checksum_begin(kvant_checksum *c)
{
    *c = (kvant_checksum){ .n = 0 };
    for (uint64_t i = 0; i < KVANT_CHECKSUM_LANES; i++)
        c->lanes[i] = KVANT_FNV_START + i;
}

static inline void kvant_checksum_stripes(kvant_checksum *c, const unsigned char *at, size_t n)
{
    uint64_t a = c->lanes[0], b = c->lanes[1], d = c->lanes[2], e = c->lanes[3];
    for (size_t i = 0; i < n; i++, at += KVANT_CHECKSUM_STRIPE) {
        uint64_t words[KVANT_CHECKSUM_LANES];
        memcpy(words, at, sizeof words);
        a = kvant_checksum_step(a, words[0]);
        b = kvant_checksum_step(b, words[1]);
        d = kvant_checksum_step(d, words[2]);
        e = kvant_checksum_step(e, words[3]);
    }
    c->lanes[0] = a, c->lanes[1] = b, c->lanes[2] = d, c->lanes[3] = e;
}

static inline void kvant_checksum_add(kvant_checksum *c, const void *bytes, size_t n)
{
    const unsigned char *at = (const unsigned char *)bytes;
    const size_t have = (size_t)(c->n % KVANT_CHECKSUM_STRIPE),
                 lacks = KVANT_CHECKSUM_STRIPE - have;
    c->n += n;
    if (n < lacks) {
        if (n)
            memcpy(c->rest + have, at, n);
        return;
    }
    if (have) {
        memcpy(c->rest + have, at, lacks);
        kvant_checksum_stripes(c, c->rest, 1);
        at += lacks, n -= lacks;
    }
    kvant_checksum_stripes(c, at, n / KVANT_CHECKSUM_STRIPE);
    memcpy(c->rest, at + n / KVANT_CHECKSUM_STRIPE * KVANT_CHECKSUM_STRIPE,
           n % KVANT_CHECKSUM_STRIPE);
}

/* The sum of all bytes so far. The last stripe is filled up with zeros. */
static inline uint64_t kvant_checksum_end(const kvant_checksum *c)
{
    const size_t have = (size_t)(c->n % KVANT_CHECKSUM_STRIPE);
    kvant_checksum all = *c;
    uint64_t state = kvant_checksum_step(KVANT_FNV_START, c->n);
    memset(all.rest + have, 0, KVANT_CHECKSUM_STRIPE - have);
    if (have)
        kvant_checksum_stripes(&all, all.rest, 1);
    for (uint32_t i = 0; i < KVANT_CHECKSUM_LANES; i++)
        state = kvant_checksum_step(state, all.lanes[i]);
    return state;
}

static inline uint64_t kvant_checksum_of(const void *bytes, size_t n)
{
    kvant_checksum c;
    kvant_checksum_begin(&c);
    kvant_checksum_add(&c, bytes, n);
    return kvant_checksum_end(&c);
}

/* testing.h - cmocka, reproducible random numbers and small helpers for all unit tests. */
#ifndef KVANT_TESTS_TESTING_H
#define KVANT_TESTS_TESTING_H

#include <kvant/codec.h>

#include "../cases.h"
#include "../cpu_levels.h"
#include "specs.h"

#define TEST_SEED 7u
#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define assert_ok(status) assert_int_equal(status, KVANT_OK)

/* xorshift64*, which is independent of the library's own generator. */
static inline uint64_t test_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1du;
}

static inline double test_uniform(uint64_t *state)
{
    return ((double)(test_random(state) >> 11) + 0.5) / 9007199254740992.0;
}

/* A normal number, by the method of Box and Muller. */
static inline float test_normal(uint64_t *state)
{
    double radius = sqrt(-2 * log(test_uniform(state)));
    return (float)(radius * cos(6.283185307179586 * test_uniform(state)));
}

static inline void fill_normal(float *x, size_t n, uint64_t *state)
{
    for (size_t i = 0; i < n; i++)
        x[i] = test_normal(state);
}

static inline void *aligned(size_t bytes)
{
    bytes = (bytes + 63) / 64 * 64;
    void *memory = aligned_alloc(64, bytes ? bytes : 64);
    assert_non_null(memory);
    memset(memory, 0, bytes ? bytes : 64);
    return memory;
}

static inline kvant_codec *make_codec(const char *spec, uint32_t head_dim, kvant_role role)
{
    kvant_codec *codec;
    char err[256] = "";
    kvant_status status =
        kvant_codec_create(spec, head_dim, role, TEST_SEED, &codec, err, sizeof err);
    if (status != KVANT_OK)
        fail_msg("%s at head_dim %u: %s", spec, (unsigned)head_dim, err);
    return codec;
}

/* The spec must be refused with this status, in a message that contains the words. */
static inline void expect_bad_spec(const char *spec, uint32_t head_dim, kvant_status expected,
                                   const char *words)
{
    kvant_codec *codec = (kvant_codec *)1;
    char err[256] = "";
    const kvant_status status =
        kvant_codec_create(spec, head_dim, KVANT_ROLE_K, 0, &codec, err, sizeof err);
    if (status != expected || codec || !err[0] || !strstr(err, words))
        fail_msg("'%s': %s, '%s' (expected %s with '%s')", spec, kvant_strerror(status), err,
                 kvant_strerror(expected), words);
}

static inline kvant_codec_info info_of(const kvant_codec *codec)
{
    kvant_codec_info info = { .size = sizeof info };
    assert_int_equal(kvant_codec_get_info(codec, &info), KVANT_OK);
    return info;
}

/* Encodes a page of 64 rows and decodes it. */
static inline void encode_decode(const char *spec, uint32_t d, kvant_role role, const float *x,
                                 float *decoded)
{
    kvant_codec *codec = make_codec(spec, d, role);
    void *page = aligned(info_of(codec).page_bytes);
    assert_int_equal(kvant_codec_encode(codec, NULL, x, d, 0, 64, page), KVANT_OK);
    assert_int_equal(kvant_codec_decode(codec, NULL, page, 0, 64, decoded, d), KVANT_OK);
    free(page);
    kvant_codec_free(&codec);
}

static inline double squared_distance(const float *a, const float *b, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
    return sum;
}

#endif

/* sized.h - checks of functions that take or fill a struct with a size field (kvant.h, "Sizes").
 *
 * struct_sizes.py reads the first two arguments of CHECK_GIVEN and CHECK_FILLED from the tests: it
 * compares them with what the public headers declare, so that no function is forgotten. */
#ifndef KVANT_TESTS_SIZED_H
#define KVANT_TESTS_SIZED_H

#include "testing.h"

#define TAIL 24 /* bytes of a newer header's members */
#define END_OF(type, member) (offsetof(type, member) + sizeof(((type *)0)->member))

/* A call that takes or fills one struct, of any size. */
typedef kvant_status struct_call(void *given);

/* An object of exactly these bytes, so that a sanitiser sees one read or written too many; the
 * size field says how many. */
static inline void *sized(const void *object, size_t known, size_t size, uint8_t tail)
{
    uint8_t *bytes = malloc(size);
    memset(bytes, 0, size);
    memcpy(bytes, object, size < known ? size : known);
    if (size > known)
        bytes[known + (size - known) / 2] = tail;
    memcpy(bytes, &size, sizeof size);
    return bytes;
}

static inline void check_given(const char *function, struct_call *take, const void *object,
                               size_t first, size_t now)
{
    for (size_t size = sizeof(size_t); size <= now + TAIL; size++) {
        void *given = sized(object, now, size, 0);
        const kvant_status status = take(given);
        if (status != (size < first ? KVANT_ERR_ARGUMENT : KVANT_OK))
            fail_msg("%s, %zu of %zu bytes: status %d, %s", function, size, now, (int)status,
                     kvant_error_message());
        free(given);
    }
    void *unknown = sized(object, now, now + TAIL, 1);
    if (take(unknown) != KVANT_ERR_ARGUMENT)
        fail_msg("%s takes members that it does not know", function);
    free(unknown);
    assert_int_equal(take(NULL), KVANT_ERR_ARGUMENT);
}

/* The bytes of a struct that was filled at this size, over bytes that were 0xaa. */
static inline uint8_t *filled(const char *function, struct_call *fill, size_t size,
                              kvant_status wanted)
{
    uint8_t *bytes = malloc(size);
    memset(bytes, 0xaa, size);
    memcpy(bytes, &size, sizeof size);
    const kvant_status status = fill(bytes);
    if (status != wanted)
        fail_msg("%s, %zu bytes: status %d", function, size, (int)status);
    assert_memory_equal(bytes, &size, sizeof size);
    return bytes;
}

static inline void check_filled(const char *function, struct_call *fill, size_t first, size_t now)
{
    uint8_t *want = filled(function, fill, now, KVANT_OK);
    for (size_t size = sizeof(size_t); size <= now + TAIL; size++) {
        uint8_t *got = filled(function, fill, size, size < first ? KVANT_ERR_ARGUMENT : KVANT_OK);
        for (size_t i = sizeof size; i < size; i++)
            if (got[i] != (size < first ? 0xaa : i < now ? want[i] : 0))
                fail_msg("%s, byte %zu of %zu is %02x", function, i, size, got[i]);
        free(got);
    }
    free(want);
    assert_int_equal(fill(NULL), KVANT_ERR_ARGUMENT);
}

/* function: the public function that call calls. object: a struct that it accepts. last: the last
 * member of the type's first released version. */
#define CHECK_GIVEN(function, type, call, object, last)                                            \
    check_given(#function, call, object, END_OF(type, last), sizeof(type))
#define CHECK_FILLED(function, type, call, last)                                                   \
    check_filled(#function, call, END_OF(type, last), sizeof(type))

#endif

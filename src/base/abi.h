/* abi.h - structs with a size field: reads and writes structs of callers with older or newer
 * headers.
 *
 * An older caller passes a shorter struct; missing members read as zero. A newer caller passes a
 * longer struct; it is accepted when the unknown bytes are zero. A struct that kvant fills is cut
 * to the caller's size, and members that this version does not know become zero. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/* Copies a caller's struct, whose first member is its size, to a struct of this version. least: the
 * size of the struct in its first release. Returns false when `from` is NULL, is shorter than
 * `least`, or has a nonzero byte that this version does not know. */
bool kvant_accept_struct(void *to, size_t size, const void *from, size_t least);

/* Fills a caller's struct from a struct of this version and keeps the caller's size field. Returns
 * false when `to` is NULL or shorter than `least`. */
bool kvant_return_struct(void *to, const void *from, size_t size, size_t least);

#define KVANT_END_OF(type, member) (offsetof(type, member) + sizeof(((type *)0)->member))

/* last: the last member of the type in its first release. */
#define KVANT_ACCEPT_STRUCT(type, to, from, last)                                                  \
    kvant_accept_struct(to, sizeof(type), from, KVANT_END_OF(type, last))
#define KVANT_RETURN_STRUCT(type, to, from, last)                                                  \
    kvant_return_struct(to, from, sizeof(type), KVANT_END_OF(type, last))

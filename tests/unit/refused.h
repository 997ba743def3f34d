/* refused.h - allocations of the library that fail when a test says so.
 *
 * The linker puts the functions __wrap_* of refused.c between the library and the C library (CMakeLists.txt). A call that meets a
 * refused allocation must report KVANT_ERR_MEMORY, leave a NULL object or one that still works, and leak nothing: blocks are counted
 * here, and AddressSanitizer's build sees bytes as well. */
#pragma once

#include "testing.h"

#include <stdatomic.h>

extern atomic_long asked, refused; /* since arm */
extern atomic_long blocks;         /* in use */

/* Refuses allocation number at from now (0: none), and with on all after it. */
void arm(long at, bool on);

/* A call, tried with its first allocation refused, its second, and so on until it needs no more. Each call cleans up after itself. */
typedef kvant_status attempt(const void *context);

/* survives: one refusal may go unnoticed, because another way to the same end asks again. */
void refuse_each_allocation(attempt *call, const void *context, const char *what, bool survives);

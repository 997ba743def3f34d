/* refused.h - makes allocations of the library fail when a test asks for it.
 *
 * The linker puts the functions __wrap_* of refused.c between the library and the C library
 * (CMakeLists.txt). A call whose allocation fails must report KVANT_ERR_MEMORY, leave a NULL object
 * or an object that still works, and leak nothing. This file counts blocks, and the build with
 * AddressSanitizer sees bytes as well. */
#pragma once

#include "testing.h"

#include <stdatomic.h>

extern atomic_long asked, refused; /* calls since arm() */
extern atomic_long blocks;         /* blocks in use */

/* Refuses allocation number `at`, counted from now (0: none); with `on`, also every allocation
 * after it. */
void arm(long at, bool on);

/* A call that is tried with its first allocation refused, then its second, and so on until every
 * allocation succeeds. Each call cleans up after itself. */
typedef kvant_status attempt(const void *context);

/* survives: the call may succeed although one allocation was refused, because it then uses another
 * way. */
void refuse_each_allocation(attempt *call, const void *context, const char *what, bool survives);

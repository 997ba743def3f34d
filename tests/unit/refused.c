/* refused.c - see refused.h. */
#include "refused.h"

#include <sys/mman.h>

void *__real_malloc(size_t);
void *__real_calloc(size_t, size_t);
void *__real_realloc(void *, size_t);
void *__real_aligned_alloc(size_t, size_t);
void __real_free(void *);
void *__real_mmap(void *, size_t, int, int, int, off_t);
int __real_munmap(void *, size_t);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *old, size_t bytes);
void *__wrap_aligned_alloc(size_t alignment, size_t bytes);
void __wrap_free(void *memory);
void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int file, off_t offset);
int __wrap_munmap(void *at, size_t bytes);

atomic_long asked, refused, blocks;
static long fail_at; /* number of the first allocation that is refused; 0: none */
static bool fail_on; /* also refuse every later allocation */

void arm(long at, bool on)
{
    asked = refused = 0;
    fail_at = at;
    fail_on = on;
}

static bool refuse(void)
{
    const long number = atomic_fetch_add(&asked, 1) + 1;
    const bool no = fail_at != 0 && (number == fail_at || (fail_on && number > fail_at));
    if (no)
        refused++;
    return no;
}

static void *counted(void *memory)
{
    if (memory)
        blocks++;
    return memory;
}

void *__wrap_malloc(size_t bytes)
{
    return refuse() ? NULL : counted(__real_malloc(bytes));
}

void *__wrap_calloc(size_t count, size_t size)
{
    return refuse() ? NULL : counted(__real_calloc(count, size));
}

void *__wrap_realloc(void *old, size_t bytes)
{
    if (refuse())
        return NULL;
    void *memory = __real_realloc(old, bytes);
    return old ? memory : counted(memory);
}

void *__wrap_aligned_alloc(size_t alignment, size_t bytes)
{
    return refuse() ? NULL : counted(__real_aligned_alloc(alignment, bytes));
}

void __wrap_free(void *memory)
{
    if (memory)
        blocks--;
    __real_free(memory);
}

void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int file, off_t offset)
{
    void *memory =
        file < 0 && refuse() ? MAP_FAILED : __real_mmap(at, bytes, protection, flags, file, offset);
    if (memory != MAP_FAILED)
        blocks++;
    return memory;
}

int __wrap_munmap(void *at, size_t bytes)
{
    blocks--;
    return __real_munmap(at, bytes);
}

void refuse_each_allocation(attempt *call, const void *context, const char *what, bool survives)
{
    /* the library has now allocated everything that it keeps until the program ends */
    assert_int_equal(call(context), KVANT_OK);
    const long before = blocks;
    for (int on = 0; on < 2; on++)
        for (long at = 1;; at++) {
            arm(at, on);
            const kvant_status status = call(context);
            const long met = refused;
            arm(0, false);
            if (blocks != before)
                fail_msg("%s: allocation %ld refused%s: %ld blocks leak", what, at,
                         on ? ", and all later ones" : "", blocks - before);
            const bool survived = survives && !on && met && status == KVANT_OK;
            if (!survived && status != (met ? KVANT_ERR_MEMORY : KVANT_OK))
                fail_msg("%s: allocation %ld refused (%ld times): %s", what, at, met,
                         kvant_strerror(status));
            if (met == 0) {
                assert_true(at > 1); /* otherwise no allocation was refused */
                break;
            }
        }
}

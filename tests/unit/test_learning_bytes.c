/* test_learning_bytes.c - a tensor counts every byte that it allocates for transforms and learning.
 * The linker puts the functions below between the library and the C library's. */
#include "rotated_text.h"

#include <pthread.h>
#include <sys/mman.h>

void *__real_aligned_alloc(size_t, size_t);
void __real_free(void *);
void *__real_mmap(void *, size_t, int, int, int, off_t);
int __real_munmap(void *, size_t);
void *__wrap_aligned_alloc(size_t alignment, size_t bytes);
void __wrap_free(void *memory);
void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int file, off_t offset);
int __wrap_munmap(void *at, size_t bytes);

/* Allocations that are not freed yet. kvant_alloc rounds each up to a multiple of 64 bytes. */
enum { MOST_LIVING = 1024, ROUNDING = 63 };
static struct {
    void *at;
    size_t bytes;
} living[MOST_LIVING];
static size_t n_living, living_bytes;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void *born(void *at, size_t bytes)
{
    pthread_mutex_lock(&lock);
    if (at && at != MAP_FAILED && n_living < MOST_LIVING) {
        living[n_living].at = at;
        living[n_living++].bytes = bytes;
        living_bytes += bytes;
    }
    pthread_mutex_unlock(&lock);
    return at;
}

static void died(const void *at)
{
    pthread_mutex_lock(&lock);
    for (size_t i = 0; at && i < n_living; i++)
        if (living[i].at == at) {
            living_bytes -= living[i].bytes;
            living[i] = living[--n_living];
            break;
        }
    pthread_mutex_unlock(&lock);
}

void *__wrap_aligned_alloc(size_t alignment, size_t bytes)
{
    return born(__real_aligned_alloc(alignment, bytes), bytes);
}

void __wrap_free(void *memory)
{
    died(memory);
    __real_free(memory);
}

void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int file, off_t offset)
{
    return born(__real_mmap(at, bytes, protection, flags, file, offset), bytes);
}

int __wrap_munmap(void *at, size_t bytes)
{
    died(at);
    return __real_munmap(at, bytes);
}

/* Bytes that a tensor counts. Centre and scale of a transform lie in memory that a tensor has from
 * its creation on, so they are left out here. */
static size_t told(const fixture *f)
{
    kvant_tensor_info info = { .size = sizeof info };
    size_t n_matrices = 0;
    assert_int_equal(kvant_tensor_get_info(f->tensor, &info), KVANT_OK);
    for (uint32_t v = 0; v <= KVANT_CANDIDATE; v++)
        n_matrices += f->tensor->transforms[v].key_transform != NULL;
    assert_true(info.learned_bytes <= info.learned_most);
    assert_true(info.working_bytes <= info.working_most);
    return info.learned_bytes + info.working_bytes - n_matrices * 2 * WIDTH * sizeof(float);
}

typedef struct balance {
    size_t told, bytes, n;
} balance;

static balance balance_of(const fixture *f)
{
    return (balance){ told(f), living_bytes, n_living };
}

/* Compares the change since the balance before. */
static void check_balance(const fixture *f, balance before)
{
    const balance now = balance_of(f);
    const size_t rounding = ROUNDING * (now.n > before.n ? now.n - before.n : 0);
    assert_true(now.n < MOST_LIVING);
    const size_t counted = now.told - before.told;
    assert_in_range(now.bytes - before.bytes, counted, counted + rounding);
}

CASE(what_is_allocated_is_counted)
{
    for (uint32_t i = 0; i < 4; i++) {
        const layout *l = &layouts()[i];
        text *t = make_text(l, i + 1);
        kvant_rope rope = rope_of(l, 4096, 0);
        rope.block_centers = i % 2;
        fixture f = make(spec, 1, BLOCKS, 0);
        assert_int_equal(kvant_tensor_set_rope(f.tensor, &rope), KVANT_OK);
        const balance before = balance_of(&f);
        for (uint32_t token = 0; token < 300; token++) {
            put_all(&f, t, token, token + 1, 1, 0);
            check_balance(&f, before);
        }
        for (uint32_t token = 300; token < 4096; token += BATCH) {
            put_all(&f, t, token, token + BATCH < 4096 ? token + BATCH : 4096, BATCH, 0);
            check_balance(&f, before);
        }
        assert_true(told(&f) > before.told); /* it has matrices */
        kvant_tensor_clear(f.tensor);
        check_balance(&f, before);
        assert_int_equal(told(&f), before.told);
        drop(&f);
        free(t);
    }
}

RUN_CASES(NULL, NULL)

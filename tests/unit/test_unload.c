/* test_unload.c LIBKVANT.SO - dlclose leaves the library mapped, because the pool's threads go on
 * to run its code. */
#include "testing.h"

#include <kvant/index.h>

#include <dlfcn.h>

enum { DIM = 64, N_ROWS = 512 };

static const char *path;

typedef struct functions {
    kvant_status (*create)(const kvant_index_params *, kvant_index **, char *, size_t);
    kvant_status (*add)(kvant_index *, const float *, size_t, size_t, const uint64_t *, uint32_t);
    void (*free)(kvant_index **);
} functions;

static void find(void *library, const char *name, void *function)
{
    void *symbol = dlsym(library, name);
    assert_non_null(symbol);
    memcpy(function, &symbol, sizeof symbol);
}

/* Adds rows with two threads, of which one is the pool's. */
static void use(void *library)
{
    static float rows[N_ROWS * DIM];
    kvant_index_params params = { .size = sizeof params, .dim = DIM };
    kvant_index *index;
    functions f;
    find(library, "kvant_index_create", &f.create);
    find(library, "kvant_index_add", &f.add);
    find(library, "kvant_index_free", &f.free);
    for (int i = 0; i < N_ROWS * DIM; i++)
        rows[i] = (float)(i % 7) - 3;
    assert_int_equal(f.create(&params, &index, NULL, 0), KVANT_OK);
    assert_int_equal(f.add(index, rows, DIM, N_ROWS, NULL, 2), KVANT_OK);
    f.free(&index);
}

CASE(the_library_stays_when_it_is_closed)
{
    for (int i = 0; i < 3; i++) {
        void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        assert_non_null(library);
        use(library);
        assert_int_equal(dlclose(library), 0);
        void *still_there = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
        assert_non_null(still_there);
        dlclose(still_there);
    }
}

int main(int argc, char **argv)
{
    path = argc > 1 ? argv[1] : "libkvant.so";
    return run_cases(NULL, NULL);
}

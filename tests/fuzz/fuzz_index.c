/* fuzz_index.c - any bytes as an index file: it is refused with a message or it is usable, and no
 * read leaves it. For libFuzzer (clang -fsanitize=fuzzer). With KVANT_FUZZ_SMOKE it is a program
 * that mutates valid files itself, a fixed number of times.
 *
 * The head's checksum would refuse most mutations at once. So the program corrects it first, and
 * tests the code after it. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <kvant/index.h>

#include "../../src/base/alloc.h"
#include "../../src/base/fnv.h"
#include "../../src/index/index_internal.h"

enum {
    HEAD = 256,
    LENGTH_AT = 32,
    CHECKSUM_AT = 40,
    HEAD_CHECKSUM_AT = 56,
    MOST_VECTORS = 4096,
    MOST_DIM = 512
};

static void repair(uint8_t *bytes, size_t n)
{
    const uint64_t length = n;
    uint8_t head[HEAD];
    if (n < HEAD)
        return;
    memcpy(bytes + LENGTH_AT, &length, sizeof length);
    memcpy(head, bytes, HEAD);
    memset(head + CHECKSUM_AT, 0, 8);
    memset(head + HEAD_CHECKSUM_AT, 0, 8);
    const uint64_t checksum = kvant_fnv1a(KVANT_FNV_START, head, HEAD);
    memcpy(bytes + HEAD_CHECKSUM_AT, &checksum, sizeof checksum);
}

/* Whatever the index holds, a search ends, and finds ids of the index or none. */
static void use(const kvant_index *index)
{
    kvant_index_info info = { .size = sizeof info };
    uint64_t ids[40];
    float scores[40];
    if (kvant_index_get_info(index, &info) != KVANT_OK)
        abort();
    if (info.dim > MOST_DIM || info.n > MOST_VECTORS)
        return;
    float *rows = calloc(2 * info.dim, sizeof *rows);
    if (!rows)
        return;
    for (uint32_t i = 0; i < 2 * info.dim; i++)
        rows[i] = (float)(i % 7) - 3;
    kvant_index_query query = {
        .size = sizeof query, .rows = rows, .stride = info.dim, .n = 2, .k = 20, .n_threads = 1
    };
    query.rerank = index->has_rows ? 30 : 0;
    if (kvant_index_search(index, &query, scores, ids) != KVANT_OK)
        abort();
    for (int i = 0; i < 40; i++)
        if (ids[i] != KVANT_INDEX_NO_ID && kvant_index_reconstruct(index, ids[i], rows) != KVANT_OK)
            abort();
    free(rows);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n); /* libFuzzer's name */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    char err[256] = "";
    kvant_error error = { err, sizeof err };
    kvant_index *index;
    uint8_t *bytes = kvant_alloc(n, 1);
    if (!bytes)
        return 0;
    memcpy(bytes, data, n);
    repair(bytes, n);
    if (kvant_index_parse(bytes, n, &index, &error) == KVANT_OK) {
        use(index);
        kvant_index_drop(&index);
    } else if (index || !err[0]) {
        abort();
    }
    kvant_free(bytes);
    return 0;
}

#ifdef KVANT_FUZZ_SMOKE
#include <stdio.h>
#include <unistd.h>

#include "mutate.h"

#define ROUNDS 20000u

static const char *const specs[] = {
    "turboquant-4", "turboquant-3:dims=9",         "turboquant-2:lists=3",
    "trellis-4",    "trellis-2:lists=3,rows=int8", "turboquant-6:rows=int8",
    "int-4:asym",   "int-3:asym,lists=2"
};
enum { KINDS = 2 * sizeof specs / sizeof *specs };

/* A saved index with 24 dimensions. If kind is odd, it has given ids. */
static size_t valid_file(uint32_t kind, uint8_t *bytes, size_t room)
{
    kvant_index_params params = { .size = sizeof params,
                                  .dim = 24,
                                  .metric = (kvant_metric)(kind % 3),
                                  .spec = specs[kind / 2] };
    kvant_index *index;
    float rows[40 * 24];
    uint64_t ids[40], state = 99 + kind;
    char path[] = "/tmp/kvant-fuzz-XXXXXX";
    const int fd = mkstemp(path);
    size_t n = 0;
    for (int i = 0; i < 40 * 24; i++)
        rows[i] = (float)(int32_t)fuzz_next(&state) * 0x1p-31f;
    for (int i = 0; i < 40; i++)
        ids[i] = fuzz_next(&state) >> 1;
    if (fd >= 0 && kvant_index_create(&params, &index, NULL, 0) == KVANT_OK) {
        if ((kind / 2 % 3 == 0 || kvant_index_train(index, rows, 24, 40) == KVANT_OK) &&
            kvant_index_add(index, rows, 24, 40, kind & 1 ? ids : NULL, 1) == KVANT_OK &&
            kvant_index_save(index, path, NULL, 0) == KVANT_OK) {
            FILE *file = fopen(path, "rb");
            n = file ? fread(bytes, 1, room, file) : 0;
            if (file)
                fclose(file);
        }
        kvant_index_free(&index);
        close(fd);
        unlink(path);
    }
    return n;
}

int main(void)
{
    static uint8_t valid[KINDS][16384], bytes[16384];
    size_t sizes[KINDS];
    uint64_t state = FUZZ_SEED;
    for (uint32_t kind = 0; kind < KINDS; kind++)
        if ((sizes[kind] = valid_file(kind, valid[kind], sizeof bytes)) <= HEAD)
            return 1;
    for (uint32_t i = 0; i < ROUNDS; i++) {
        size_t n = sizes[i % KINDS];
        memcpy(bytes, valid[i % KINDS], n);
        if (i >= KINDS) /* the valid files first */
            fuzz_mutate(bytes, &n, HEAD, 4, &state);
        LLVMFuzzerTestOneInput(bytes, n);
    }
    printf("%u mutated files: none read beyond its end\n", ROUNDS);
    return 0;
}
#endif

/* Nearest neighbours of compressed vectors: an index is trained, filled, saved, mapped and
 * searched.
 *
 *     cc search.c $(pkg-config --cflags --libs kvant) -o search && ./search FOLDER
 */
#include <kvant/index.h>

#include "example.h"

enum { DIM = 96, VECTORS = 2000 };

static uint64_t nearest(const kvant_index *index, const kvant_index_gpu *gpu, const float *row)
{
    const kvant_index_query query = {
        .size = sizeof query, .rows = row, .stride = DIM, .n = 1, .k = 1
    };
    float score;
    uint64_t id;
    check(gpu ? kvant_index_gpu_search(gpu, &query, &score, &id)
              : kvant_index_search(index, &query, &score, &id));
    return id;
}

/* The same search on a GPU, if there is one. */
static void search_on_gpu(const kvant_index *index, const float *row)
{
    char reason[256];
    kvant_index_gpu *gpu;
    if (kvant_index_gpu_create(index, &gpu, reason, sizeof reason) != KVANT_OK)
        printf("no search on a GPU: %s\n", reason);
    else
        printf("on the GPU: id %llu\n", (unsigned long long)nearest(index, gpu, row));
    kvant_index_gpu_free(&gpu);
}

int main(int argc, char **argv)
{
    const kvant_index_params params = { .size = sizeof params, .dim = DIM };
    float *rows = random_numbers(VECTORS * DIM), again[DIM];
    char file[512];
    kvant_index *index, *view;
    snprintf(file, sizeof file, "%s/example.kvix", argc > 1 ? argv[1] : ".");
    check(kvant_index_create(&params, &index, NULL, 0));
    check(kvant_index_train(index, rows, DIM, VECTORS)); /* optional: the centre of the vectors */
    check(kvant_index_add(index, rows, DIM, VECTORS, NULL, 2)); /* ids 0, 1, 2, ... */
    check(kvant_index_remove(index, 0));
    check(kvant_index_reconstruct(index, 7, again)); /* as the codes have it */
    check(kvant_index_save(index, file, NULL, 0));
    search_on_gpu(index, rows + 7 * DIM);
    kvant_index_free(&index);

    check(kvant_index_load(file, &index, NULL, 0)); /* into memory, checked */
    check(kvant_index_view(file, &view, NULL, 0));  /* mapped: read when it is searched */
    check(kvant_index_verify(view));
    kvant_index_info info = { .size = sizeof info };
    check(kvant_index_get_info(view, &info));
    printf("%llu vectors of %zu bytes; nearest to 7: %llu and %llu\n", (unsigned long long)info.n,
           info.bytes_per_vector, (unsigned long long)nearest(index, NULL, rows + 7 * DIM),
           (unsigned long long)nearest(view, NULL, again));
    kvant_index_free(&index);
    kvant_index_free(&view);
    free(rows);
    return remove(file) != 0;
}

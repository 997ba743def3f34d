/* gpu.c - an index whose codes a GPU searches. Queries are rounded and results are scored as on the
 * CPU (search.c). */
#include <kvant/cuda.h>

#include "../base/alloc.h"
#include "index_internal.h"

enum { AT_ONCE = 64 }; /* packs that are decoded and sent together */

struct kvant_index_gpu {
    const kvant_index *index;
    uint64_t changes; /* the index's `changes` when the codes were copied */
    kvant_cuda_index *codes;
};

/* Copies packs that products cannot read as packs of 8 bits. */
static kvant_status put_decoded(const kvant_index *index, kvant_cuda_index *codes)
{
    const kvant_book *book = &index->book;
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    const size_t bytes = kvant_pack_bytes(&book->levels), n_packs = kvant_index_packs(index);
    uint8_t *levels = kvant_alloc(AT_ONCE * bytes + kvant_book_scratch(book, index->code_dim), 1);
    kvant_status status = levels ? KVANT_OK : KVANT_ERR_MEMORY;
    for (size_t first = 0; status == KVANT_OK && first < n_packs; first += AT_ONCE) {
        const size_t n = n_packs - first < AT_ONCE ? n_packs - first : AT_ONCE;
        for (size_t i = 0; i < n; i++)
            kvant_book_decode(book, kernels,
                              index->codes + (first + i) * kvant_book_pack_bytes(book),
                              levels + i * bytes, levels + AT_ONCE * bytes);
        status = kvant_cuda_index_put(codes, first, n, levels);
    }
    kvant_free(levels);
    return status;
}

static kvant_status copy_codes(const kvant_index *index, kvant_index_gpu *gpu,
                               const kvant_error *error)
{
    const kvant_pack_format *format = &index->book.levels;
    const kvant_cuda_index_args args = { .bits = format->bits,
                                         .n_quads = format->n_quads,
                                         .levels = format->levels,
                                         .bias = format->bias,
                                         .n = index->n,
                                         .factors = index->factors,
                                         .offsets = index->offsets,
                                         .ids = index->ids };
    KVANT_FORWARD(kvant_cuda_available(error->text, error->size));
    kvant_status status = kvant_cuda_index_create(&args, &gpu->codes);
    if (status == KVANT_OK)
        status = kvant_book_is_decoded(&index->book)
                     ? put_decoded(index, gpu->codes)
                     : kvant_cuda_index_put(gpu->codes, 0, kvant_index_packs(index), index->codes);
    return status == KVANT_OK ? status
                              : kvant_fail(error, status, "copying the index to the GPU: %s",
                                           kvant_strerror(status));
}

kvant_status kvant_index_gpu_create(const kvant_index *index, kvant_index_gpu **gpu, char *err,
                                    size_t errlen)
{
    const kvant_error error = { err, errlen };
    if (gpu)
        *gpu = NULL;
    if (!index || !gpu)
        return kvant_fail(&error, KVANT_ERR_ARGUMENT, "index or gpu is NULL");
    if (index->n_lists)
        return kvant_fail(&error, KVANT_ERR_UNSUPPORTED,
                          "not on the GPU: an index with lists=: search it on the CPU");
    KVANT_FORWARD(kvant_index_check_view(index, &error));
    kvant_index_gpu *made = kvant_alloc(1, sizeof *made);
    if (!made)
        return kvant_fail(&error, KVANT_ERR_MEMORY, "out of memory for the copy of an index");
    made->index = index;
    made->changes = index->changes;
    const kvant_status status = copy_codes(index, made, &error);
    if (status == KVANT_OK)
        *gpu = made;
    else
        kvant_index_gpu_free(&made);
    return status;
}

void kvant_index_gpu_free(kvant_index_gpu **gpu)
{
    if (!gpu || !*gpu)
        return;
    kvant_cuda_index_free(&(*gpu)->codes);
    kvant_free(*gpu);
    *gpu = NULL;
}

kvant_status kvant_index_gpu_search(const kvant_index_gpu *gpu, const kvant_index_query *query,
                                    float *scores, uint64_t *ids)
{
    KVANT_RETURN_IF(!gpu, KVANT_ERR_ARGUMENT);
    if (gpu->changes != gpu->index->changes)
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT,
                          "the index has changed since it was copied to the GPU: call "
                          "kvant_index_gpu_create again");
    return kvant_index_search_on(gpu->codes, gpu->index, query, scores, ids);
}

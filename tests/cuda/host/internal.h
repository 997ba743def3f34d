/* internal.h - what the files of the stand-in share (host.h). */
#ifndef KVANT_TESTS_CUDA_HOST_INTERNAL_H
#define KVANT_TESTS_CUDA_HOST_INTERNAL_H

#include "../../../src/codec/encode.h"
#include "../../../src/cuda/table.h"
#include "host.h"

enum { TOKENS = KVANT_PAGE_TOKENS, MOST = KVANT_MAX_HEAD_DIM };

/* A refusal of attention_check, for programs that do not open the library themselves. */
#define HOST_NO_PAIR_ENV "HOST_CUDA_NO_PAIR"

/* "append", "seal", "decode" or "attention": what this function computes is a little wrong, for programs
 * that must find it. A wrong attention is one of 32 query tokens. */
#define HOST_WRONG_ENV "HOST_CUDA_WRONG"
bool host_is_wrong(const char *function);

extern host_control host;

/* Sets a field of host: caches in different threads call the library at the same time. */
void host_note(void *at, const void *value, size_t bytes);

/* Notes a call; true when the test wants an answer instead of a result. */
bool host_answers(const char *function, const void *arguments, size_t size,
                  kvant_cuda_stream stream);

/* Functions with a struct of arguments, which can be captured. */
#define HOST_RECORDED(X)                                                                           \
    X(append, kvant_cuda_kernel_append_args)                                                       \
    X(seal, kvant_cuda_seal_args)                                                                  \
    X(attention, kvant_cuda_kernel_attention_args)                                                 \
    X(block_attention, kvant_cuda_block_args)                                                      \
    X(transform_queries, kvant_cuda_kernel_query_args)                                             \
    X(center_rows, kvant_cuda_center_rows_args)                                                    \
    X(page_offsets, kvant_cuda_page_offsets_args)                                                  \
    X(fill_marked, kvant_cuda_marked_args)                                                         \
    X(decode, kvant_cuda_decode_args)

typedef void host_work(void *data);
#define HOST_RUN(name, type) host_work host_run_##name;
HOST_RECORDED(HOST_RUN)
#undef HOST_RUN

/* A function of the driver: a program that opens this library finds it by name, so no header declares it. */
#define EXPORT(type, name, arguments)                                                              \
    __attribute__((visibility("default"))) type name arguments;                                    \
    type name arguments

/* The current context, and whether the driver's memory is of its GPU. */
void *host_context(void);
__attribute__((visibility("default"))) bool host_is_here(const void *memory);

/* record.c: whether work on the stream is recorded; records it then, with a copy of data. */
bool host_captures(kvant_cuda_stream stream);
bool host_is_foreign(kvant_cuda_stream stream); /* of another GPU than the current one */
__attribute__((visibility("default"))) bool host_record(kvant_cuda_stream stream, host_work *run,
                                                        const void *data, size_t bytes);

#define ANSWER(name, args, stream)                                                                 \
    do {                                                                                           \
        if (host_answers("host_" #name, args, (args)->size, stream))                               \
            return host.answer;                                                                    \
        if (host_is_foreign(stream))                                                               \
            return KVANT_ERR_CUDA;                                                                 \
        if (host_record(stream, host_run_##name, args, (args)->size))                              \
            return KVANT_OK;                                                                       \
    } while (0)

/* Whose codes a codec's pages hold: the CPU's codec, which has to outlive the other. */
const kvant_codec *host_source(const kvant_cuda_codec *codec);
bool host_is_open(const kvant_cuda_codec *codec);
/* The transform with the weights of a kv head, or with none. */
kvant_transform host_transform(const kvant_cuda_codec *codec, const float *weights, uint32_t head);

/* Rows about their blocks' centres; false if arguments are missing. */
bool host_center(const kvant_cuda_center_rows_args *args);

void host_turn_queries(const kvant_cuda_kernel_query_args *args);

/* The codec with the centroids of a kv head, where there are any. */
kvant_codec host_of_head(const kvant_codec *codec, const float *centroids, uint32_t head);

/* The driver was asked for memory and streams: work on the stream NULL is not in its graphs. */
bool host_driver_runs(void);

static inline const kvant_kernels *host_kernels(void)
{
    return kvant_kernels_get(KVANT_CPU_AUTO);
}

static inline uint8_t *host_page(const kvant_cuda_pages *pages, int64_t block, uint32_t head)
{
    return (uint8_t *)pages->base + (size_t)block * pages->block_stride + head * pages->head_stride;
}

/* The table's functions are named as its members. */
#define HOST_DECLARE(result, name, parameters) result host_##name parameters;
KVANT_CUDA_TABLE_FUNCTIONS(HOST_DECLARE)
#undef HOST_DECLARE

#endif

/* internal.h - declarations that the files of the mock device share (host.h). */
#ifndef KVANT_TESTS_CUDA_HOST_INTERNAL_H
#define KVANT_TESTS_CUDA_HOST_INTERNAL_H

#include "../../../src/codec/encode.h"
#include "../../../src/cuda/table.h"
#include "host.h"

enum { TOKENS = KVANT_PAGE_TOKENS, MOST = KVANT_MAX_HEAD_DIM };

/* Makes attention_check refuse, for programs that do not open the library themselves. */
#define HOST_NO_PAIR_ENV "HOST_CUDA_NO_PAIR"

/* "append", "seal", "decode" or "attention": this function computes slightly wrong results, for
 * programs that must notice it. A wrong attention is wrong for one of 32 query tokens. */
#define HOST_WRONG_ENV "HOST_CUDA_WRONG"
bool host_is_wrong(const char *function);

extern host_control host;

/* Sets a field of `host` under a lock, because caches in different threads call the library at the
 * same time. */
void host_note(void *at, const void *value, size_t bytes);

/* Notes a call. Returns true if the test wants a status instead of a result. */
bool host_answers(const char *function, const void *arguments, size_t size,
                  kvant_cuda_stream stream);

/* Functions with a struct of arguments, whose calls can be captured. */
#define HOST_RECORDED(X)                                                                           \
    X(append, kvant_cuda_kernel_append_args)                                                       \
    X(seal, kvant_cuda_seal_args)                                                                  \
    X(attention, kvant_cuda_kernel_attention_args)                                                 \
    X(block_attention, kvant_cuda_block_args)                                                      \
    X(transform_queries, kvant_cuda_kernel_query_args)                                             \
    X(center_rows, kvant_cuda_center_rows_args)                                                    \
    X(page_offsets, kvant_cuda_page_offsets_args)                                                  \
    X(compact, kvant_cuda_compact_args)                                                            \
    X(expand, kvant_cuda_expand_args)                                                              \
    X(place_centers, kvant_cuda_place_centers_args)                                                \
    X(fill_marked, kvant_cuda_marked_args)                                                         \
    X(decode, kvant_cuda_decode_args)                                                              \
    X(exact_step, kvant_cuda_exact_args)                                                           \
    X(seal_rows, kvant_cuda_seal_rows_args)                                                        \
    X(learn, kvant_cuda_learn_args)

typedef void host_work(void *data);
#define HOST_RUN(name, type) host_work host_run_##name;
HOST_RECORDED(HOST_RUN)
#undef HOST_RUN

/* Declares and defines a function of the driver. A program that opens this library finds it by
 * name, so no header declares it. */
#define EXPORT(type, name, arguments)                                                              \
    __attribute__((visibility("default"))) type name arguments;                                    \
    type name arguments

/* The current context, and whether memory of the driver belongs to its GPU. */
void *host_context(void);
__attribute__((visibility("default"))) bool host_is_here(const void *memory);

/* record.c: if work on the stream is recorded, records it with a copy of data and returns true. */
bool host_captures(kvant_cuda_stream stream);
/* whether the stream belongs to another GPU than the current one */
bool host_is_foreign(kvant_cuda_stream stream);
__attribute__((visibility("default"))) bool host_record(kvant_cuda_stream stream, host_work *run,
                                                        const void *data, size_t bytes);

/* order.c: the order of work of streams, by their numbers in record.c; below 0: not known. The
 * program ends at a read or write of watched memory that is not ordered after earlier ones. */
enum { HOST_STREAMS = 64 };
typedef struct host_clock {
    unsigned long of[HOST_STREAMS];
} host_clock;
int host_stream_number(kvant_cuda_stream handle);
void host_order_launches(int stream);
void host_order_records(int stream, host_clock *event);
void host_order_waits(int stream, const host_clock *event);
void host_order_finishes(int stream);
void host_order_frees(const void *at, size_t bytes);
void host_reads(kvant_cuda_stream stream, const void *at);
__attribute__((visibility("default"))) void host_writes(kvant_cuda_stream stream, const void *at);

#define ANSWER(name, args, stream)                                                                 \
    do {                                                                                           \
        if (host_answers("host_" #name, args, (args)->size, stream))                               \
            return host.answer;                                                                    \
        if (host_is_foreign(stream))                                                               \
            return KVANT_ERR_CUDA;                                                                 \
        if (host_record(stream, host_run_##name, args, (args)->size))                              \
            return KVANT_OK;                                                                       \
    } while (0)

/* The CPU codec whose codes a codec's pages hold. The CPU codec must outlive the GPU's codec. */
const kvant_codec *host_source(const kvant_cuda_codec *codec);
bool host_is_open(const kvant_cuda_codec *codec);
/* The transform with the key transform W of a kv head, or without one. */
kvant_transform host_transform(const kvant_cuda_codec *codec, const float *key_transform,
                               uint32_t head);

/* The transform of a kv head in the compact form. */
kvant_transform host_compact_transform(const kvant_cuda_codec *codec, const void *compact,
                                       uint32_t head);
void host_copy_compact(void *to, const void *compact, const kvant_cuda_codec *codec,
                       uint32_t n_kv_heads);

/* Subtracts block centres from rows; false if arguments are missing. */
bool host_center(const kvant_cuda_center_rows_args *args);

void host_rotate_queries(const kvant_cuda_kernel_query_args *args, kvant_cuda_stream stream);

/* The codec with the centroids of a kv head, if it has any. */
kvant_codec host_of_head(const kvant_codec *codec, const float *centroids, uint32_t head);

/* Whether the driver was asked for memory and streams: then work on the stream NULL is not in its
 * graphs. */
bool host_driver_runs(void);

static inline const kvant_kernels *host_kernels(void)
{
    return kvant_kernels_get(KVANT_CPU_AUTO);
}

static inline uint8_t *host_page(const kvant_cuda_pages *pages, int64_t block, uint32_t head)
{
    return (uint8_t *)pages->base + (size_t)block * pages->block_stride + head * pages->head_stride;
}

/* The table of the mock, with what host_control asks for. */
kvant_cuda_table *host_table(void);

/* A function of the table has the name of its member. */
#define HOST_DECLARE(result, name, parameters) result host_##name parameters;
KVANT_CUDA_TABLE_FUNCTIONS(HOST_DECLARE)
#undef HOST_DECLARE

#endif

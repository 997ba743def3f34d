/* cuda.c - the public functions of kvant/cuda.h and kvant/cuda_kernels.h, and the functions of
 * memory.h and index.h. Finds libkvant_cuda.so when a function first needs it, and calls the
 * functions of its table.
 *
 * Owns finding and checking the library; knows no kernel. A missing library, or a library of
 * another release, gives KVANT_ERR_UNSUPPORTED, and the next call looks for the library again. An
 * accepted library stays loaded. */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "../base/abi.h"
#include "../base/error.h"
#include "../base/os.h"
#include "../codec/codec_internal.h"
#include "cuda_table.h"
#include "index.h"
#include "memory.h"

#define LIBRARY_FILE KVANT_OS_LIBRARY("kvant_cuda")
#define LIBRARY_ENV "KVANT_CUDA_LIBRARY"
#define MESSAGE_BYTES 512 /* a longer message of the library is cut */

static struct {
    pthread_mutex_t mutex; /* held while the library is opened */
    _Atomic(const kvant_cuda_table *) table;
} loader = { .mutex = PTHREAD_MUTEX_INITIALIZER };

static kvant_status check_table(const kvant_cuda_table *table, const char *file,
                                const kvant_error *error)
{
    if (!table)
        return kvant_fail(error, KVANT_ERR_UNSUPPORTED,
                          "%s is damaged: it returns no table of GPU functions", file);
    if (table->version != KVANT_CUDA_TABLE_VERSION)
        return kvant_fail(error, KVANT_ERR_UNSUPPORTED,
                          "%s has version %u of the table of GPU functions, and this libkvant "
                          "needs %u: install both "
                          "from one release",
                          file, (unsigned)table->version, KVANT_CUDA_TABLE_VERSION);
    if (table->size != sizeof *table || table->view_bytes != sizeof(kvant_codec_view) ||
        table->info_bytes != sizeof(kvant_codec_info) || table->args_bytes != KVANT_CUDA_ARGS_BYTES)
        return kvant_fail(
            error, KVANT_ERR_UNSUPPORTED,
            "%s was compiled with other structs than this libkvant: install both from one release",
            file);
    return KVANT_OK;
}

static const kvant_cuda_table *request_table(void *library, const char *file,
                                             const kvant_error *error)
{
    void *symbol = kvant_os_symbol(library, KVANT_CUDA_TABLE_FUNCTION);
    kvant_cuda_table_get_fn *get = NULL;
    /* ISO C has no conversion from void * to a function pointer. */
    memcpy(&get, &symbol, sizeof get);
    if (!get) {
        kvant_fail(error, KVANT_ERR_UNSUPPORTED,
                   "%s has no " KVANT_CUDA_TABLE_FUNCTION
                   ": it is not a libkvant_cuda of this release",
                   file);
        return NULL;
    }
    const kvant_cuda_table *table = get();
    return check_table(table, file, error) == KVANT_OK ? table : NULL;
}

/* Loads the library. Returns its table, or NULL after filling error. */
static const kvant_cuda_table *open_library(const kvant_error *error)
{
    const char *named = kvant_os_variable(LIBRARY_ENV),
               *file = named && named[0] ? named : LIBRARY_FILE;
    void *library = kvant_os_open_library(file);
    if (!library) {
        kvant_fail(error, KVANT_ERR_UNSUPPORTED,
                   "cannot load the library for GPUs (%s); " LIBRARY_ENV
                   " names the file if it is elsewhere",
                   kvant_os_library_error());
        return NULL;
    }
    const kvant_cuda_table *table = request_table(library, file, error);
    if (!table)
        kvant_os_close_library(library);
    return table;
}

/* Returns the table, and loads the library if no call has done so. NULL after filling error. */
static const kvant_cuda_table *load_table(const kvant_error *error)
{
    const kvant_cuda_table *table = atomic_load_explicit(&loader.table, memory_order_acquire);
    if (table)
        return table;
    pthread_mutex_lock(&loader.mutex);
    table = atomic_load_explicit(&loader.table, memory_order_relaxed);
    if (!table) {
        table = open_library(error);
        atomic_store_explicit(&loader.table, table, memory_order_release);
    }
    pthread_mutex_unlock(&loader.mutex);
    return table;
}

/* Passes a message from the table to the caller and to kvant_error_message(). */
static kvant_status set_message(kvant_status status, const char *text, const kvant_error *error)
{
    return status == KVANT_OK
               ? KVANT_OK
               : kvant_fail(error, status, "%s", text[0] ? text : kvant_strerror(status));
}

kvant_status kvant_cuda_available(char *err, size_t errlen)
{
    const kvant_error error = { err, errlen };
    const kvant_cuda_table *table = load_table(&error);
    char text[MESSAGE_BYTES] = "";
    return table ? set_message(table->device_check(text, sizeof text), text, &error)
                 : KVANT_ERR_UNSUPPORTED;
}

kvant_status kvant_cuda_codec_from(const kvant_codec *source, kvant_cuda_codec **codec, char *err,
                                   size_t errlen)
{
    const kvant_error error = { err, errlen };
    const kvant_transform_view *transform =
        source ? &kvant_codec_get_view(source)->transform : NULL;
    if (transform && transform->rotate == KVANT_ROTATE_DENSE &&
        (!transform->key_transform || transform->diagonal)) {
        if (codec)
            *codec = NULL;
        return kvant_fail(&error, KVANT_ERR_UNSUPPORTED,
                          "not on the GPU outside of a cache (kvant/cache.h): rotate=dense, the "
                          "default of turboquant, octopus and trellis if head_dim is not a power "
                          "of two: use rotate=hadamard or rotate=none");
    }
    return kvant_cuda_codec_unrotated(source, codec, err, errlen);
}

/* Kernels multiply queries by the scale of norm= after the matrix. That is right for a matrix that
 * replaces the scale, and wrong for a permutation. A canonical spec names order= if it was set. */
static bool scales_behind_order(const kvant_codec_view *view)
{
    return view->info->norm != KVANT_NORM_NONE && strstr(view->info->spec, "order=") != NULL;
}

kvant_status kvant_cuda_codec_unrotated(const kvant_codec *source, kvant_cuda_codec **codec,
                                        char *err, size_t errlen)
{
    const kvant_error error = { err, errlen };
    char text[MESSAGE_BYTES] = "";
    if (!codec)
        return kvant_fail(&error, KVANT_ERR_ARGUMENT,
                          "the argument that receives the codec is NULL");
    *codec = NULL;
    if (!source)
        return kvant_fail(&error, KVANT_ERR_ARGUMENT, "the codec is NULL");
    if (scales_behind_order(kvant_codec_get_view(source)))
        return kvant_fail(
            &error, KVANT_ERR_UNSUPPORTED,
            "not on the GPU: order= with norm=: leave one of them out, or use the CPU");
    const kvant_cuda_table *table = load_table(&error);
    KVANT_RETURN_IF(!table, KVANT_ERR_UNSUPPORTED);
    return set_message(table->codec_create(kvant_codec_get_view(source), codec, text, sizeof text),
                       text, &error);
}

kvant_status kvant_cuda_codec_create(const char *spec, uint32_t head_dim, kvant_role role,
                                     uint64_t seed, kvant_cuda_codec **codec, char *err,
                                     size_t errlen)
{
    const kvant_error error = { err, errlen };
    kvant_codec *source = NULL;
    if (!codec)
        return kvant_fail(&error, KVANT_ERR_ARGUMENT,
                          "the argument that receives the codec is NULL");
    *codec = NULL;
    KVANT_FORWARD(kvant_codec_create(spec, head_dim, role, seed, &source, err, errlen));
    kvant_status status = kvant_cuda_codec_from(source, codec, err, errlen);
    kvant_codec_free(&source);
    return status;
}

kvant_status kvant_cuda_codec_tables(const kvant_codec *source, kvant_cuda_tables *tables)
{
    KVANT_RETURN_IF(!source, KVANT_ERR_ARGUMENT);
    const kvant_codec_view *view = kvant_codec_get_view(source);
    const kvant_transform_view *transform = &view->transform;
    const bool centroids = view->general.uniform.clusters != 0;
    const size_t d = source->info.head_dim;
    const kvant_cuda_tables full = { .center = transform->center,
                                     .scale = transform->scale,
                                     .key_transform = transform->key_transform,
                                     .inverse_key_transform = transform->inverse_key_transform,
                                     .key_transform_size = !transform->key_transform ? 0
                                                           : transform->diagonal     ? d
                                                                                     : d * d,
                                     .pivots = view->feedback.pivots,
                                     .columns = view->feedback.columns,
                                     .centroids = centroids ? view->tables : NULL,
                                     .n_centroids =
                                         centroids ? view->table_bytes / sizeof(float) : 0 };
    return KVANT_RETURN_STRUCT(kvant_cuda_tables, tables, &full, key_transform_size)
               ? KVANT_OK
               : KVANT_ERR_ARGUMENT;
}

/* A sealed codec comes from the library, so the table is loaded here. */
kvant_status kvant_cuda_codec_create_open(const kvant_cuda_codec *sealed, kvant_cuda_codec **open)
{
    KVANT_RETURN_IF(!open, KVANT_ERR_ARGUMENT);
    *open = NULL;
    return sealed ? load_table(NULL)->codec_create_open(sealed, open) : KVANT_ERR_ARGUMENT;
}

void kvant_cuda_codec_free(kvant_cuda_codec **codec)
{
    if (codec && *codec)
        load_table(NULL)->codec_free(codec);
}

kvant_status kvant_cuda_codec_get_info(const kvant_cuda_codec *codec, kvant_codec_info *info)
{
    kvant_codec_info full = { .size = sizeof full };
    KVANT_RETURN_IF(!codec, KVANT_ERR_ARGUMENT);
    KVANT_FORWARD(load_table(NULL)->codec_get_info(codec, &full));
    return KVANT_RETURN_STRUCT(kvant_codec_info, info, &full, nominal_bits) ? KVANT_OK
                                                                            : KVANT_ERR_ARGUMENT;
}

kvant_status kvant_cuda_attention_check(const kvant_cuda_codec *k_codec,
                                        const kvant_cuda_codec *v_codec, char *err, size_t errlen)
{
    const kvant_error error = { err, errlen };
    const kvant_cuda_table *table = load_table(&error);
    char text[MESSAGE_BYTES] = "";
    KVANT_RETURN_IF(!table, KVANT_ERR_UNSUPPORTED);
    return set_message(table->attention_check(k_codec, v_codec, text, sizeof text), text, &error);
}

size_t kvant_cuda_attention_workspace(uint32_t head_dim)
{
    const kvant_cuda_table *table = load_table(NULL);
    return table ? table->attention_workspace(head_dim, 1) : 0;
}

size_t kvant_cuda_kernel_workspace(uint32_t head_dim, uint32_t n_matrices)
{
    const kvant_cuda_table *table = load_table(NULL);
    return table ? table->attention_workspace(head_dim, n_matrices) : 0;
}

size_t kvant_cuda_block_workspace(const kvant_cuda_block_args *args)
{
    const kvant_cuda_table *table = load_table(NULL);
    kvant_cuda_block_args full;
    return table && KVANT_ACCEPT_STRUCT(kvant_cuda_block_args, &full, args, workspace_bytes)
               ? table->block_workspace(&full)
               : 0;
}

void kvant_cuda_limit_shared_memory(size_t bytes)
{
    const kvant_cuda_table *table = load_table(NULL);
    if (table)
        table->limit_shared_memory(bytes);
}

/* A call with a struct of arguments that has the caller's size. last: the last member of the struct
 * in its first release. */
#define TABLE_CALL(name, entry, type, last)                                                        \
    kvant_status kvant_cuda_##name(const type *args, kvant_cuda_stream stream)                     \
    {                                                                                              \
        const kvant_cuda_table *table = load_table(NULL);                                          \
        type full;                                                                                 \
        KVANT_RETURN_IF(!table, KVANT_ERR_UNSUPPORTED);                                            \
        return KVANT_ACCEPT_STRUCT(type, &full, args, last) ? table->entry(&full, stream)          \
                                                            : KVANT_ERR_ARGUMENT;                  \
    }

TABLE_CALL(seal, seal, kvant_cuda_seal_args, refused)
TABLE_CALL(decode, decode, kvant_cuda_decode_args, inverse_key_transform)
TABLE_CALL(compact, compact, kvant_cuda_compact_args, compact)
TABLE_CALL(expand, expand, kvant_cuda_expand_args, inverse_key_transform)
TABLE_CALL(place_centers, place_centers, kvant_cuda_place_centers_args, layers)
TABLE_CALL(fill_marked, fill_marked, kvant_cuda_marked_args, out_head_stride)
TABLE_CALL(block_attention, block_attention, kvant_cuda_block_args, workspace_bytes)
TABLE_CALL(center_rows, center_rows, kvant_cuda_center_rows_args, out)
TABLE_CALL(page_offsets, page_offsets, kvant_cuda_page_offsets_args, offsets)
TABLE_CALL(exact_step, exact_step, kvant_cuda_exact_args, n_sealed)
TABLE_CALL(seal_rows, seal_rows, kvant_cuda_seal_rows_args, refused)
TABLE_CALL(learn, learn, kvant_cuda_learn_args, workspace_bytes)
TABLE_CALL(kernel_append, append, kvant_cuda_kernel_append_args, centered)
TABLE_CALL(kernel_attention, attention, kvant_cuda_kernel_attention_args, plain_queries)
TABLE_CALL(kernel_transform_queries, transform_queries, kvant_cuda_kernel_query_args, further)

/* A call of cuda.h. Its struct is the first part of a struct of cuda_kernels.h, which the table
 * takes. The further members become zeros; next is the first of them. test_cuda_loader compares the
 * places of all members of both structs. */
#define SHORT_CALL(name, type, last, next)                                                         \
    _Static_assert(sizeof(kvant_cuda_##type) == offsetof(kvant_cuda_kernel_##type, next),          \
                   "the struct of cuda.h ends where cuda_kernels.h goes on");                      \
    kvant_status kvant_cuda_##name(const kvant_cuda_##type *args, kvant_cuda_stream stream)        \
    {                                                                                              \
        kvant_cuda_##type given;                                                                   \
        KVANT_RETURN_IF(!load_table(NULL), KVANT_ERR_UNSUPPORTED);                                 \
        KVANT_RETURN_IF(!KVANT_ACCEPT_STRUCT(kvant_cuda_##type, &given, args, last),               \
                        KVANT_ERR_ARGUMENT);                                                       \
        kvant_cuda_kernel_##type full = { 0 };                                                     \
        memcpy(&full, &given, sizeof given);                                                       \
        full.size = sizeof full;                                                                   \
        return kvant_cuda_kernel_##name(&full, stream);                                            \
    }

SHORT_CALL(append, append_args, refused, slots_ready)
SHORT_CALL(attention, attention_args, workspace_bytes, table_ready)
SHORT_CALL(transform_queries, query_args, out, n_further)

/* A call that is passed to the table without changes. */
#define FORWARD(name, parameters, arguments)                                                       \
    kvant_status kvant_cuda_##name parameters                                                      \
    {                                                                                              \
        const kvant_cuda_table *table = load_table(NULL);                                          \
        return table ? table->name arguments : KVANT_ERR_UNSUPPORTED;                              \
    }

/* memory.h */

FORWARD(device_current, (int *device), (device))
FORWARD(memory_copy, (void *to, const void *from, size_t bytes, kvant_cuda_stream stream),
        (to, from, bytes, stream))
FORWARD(memory_read, (void *to, const void *from, size_t bytes, kvant_cuda_stream stream),
        (to, from, bytes, stream))
FORWARD(memory_clear, (void *memory, size_t bytes, kvant_cuda_stream stream),
        (memory, bytes, stream))
FORWARD(largest, (const kvant_cuda_values *numbers, float *largest, kvant_cuda_stream stream),
        (numbers, largest, stream))
FORWARD(note_rows, (const kvant_cuda_note_args *args, kvant_cuda_stream stream), (args, stream))
FORWARD(rotate_rows, (const kvant_cuda_rotate_rows_args *args, kvant_cuda_stream stream),
        (args, stream))

kvant_status kvant_cuda_memory_new(void **memory, size_t bytes)
{
    const kvant_cuda_table *table = load_table(NULL);
    *memory = NULL;
    return table ? table->memory_new(memory, bytes) : KVANT_ERR_UNSUPPORTED;
}

void kvant_cuda_memory_free(void *memory)
{
    if (memory)
        load_table(NULL)->memory_free(memory);
}

kvant_status kvant_cuda_host_new(void **memory, size_t bytes)
{
    const kvant_cuda_table *table = load_table(NULL);
    *memory = NULL;
    return table ? table->host_new(memory, bytes) : KVANT_ERR_UNSUPPORTED;
}

void kvant_cuda_host_free(void *memory)
{
    if (memory)
        load_table(NULL)->host_free(memory);
}

/* index.h */

kvant_status kvant_cuda_index_create(const kvant_cuda_index_args *args, kvant_cuda_index **index)
{
    const kvant_cuda_table *table = load_table(NULL);
    *index = NULL;
    return table ? table->index_create(args, index) : KVANT_ERR_UNSUPPORTED;
}

void kvant_cuda_index_free(kvant_cuda_index **index)
{
    if (*index)
        load_table(NULL)->index_free(index);
}

FORWARD(index_put, (kvant_cuda_index * index, size_t first, size_t n, const uint8_t *codes),
        (index, first, n, codes))
FORWARD(index_find, (kvant_cuda_index * index, const kvant_cuda_find_args *args), (index, args))

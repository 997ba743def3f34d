/* fake_cuda.c - a library in the place of libkvant_cuda.so for test_cuda_door.c: a table whose functions
 * record their arguments. FAKE_VERSION, FAKE_VIEW and FAKE_GET make it one that libkvant must refuse. */
#include "fake_cuda.h"

#include <stdlib.h>
#include <string.h>

#ifndef FAKE_VERSION
#define FAKE_VERSION KVANT_CUDA_TABLE_VERSION
#endif
#ifndef FAKE_GET
#define FAKE_GET kvant_cuda_table_get
#endif
#ifndef FAKE_VIEW
#define FAKE_VIEW sizeof(kvant_codec_view)
#endif

struct kvant_cuda_codec {
    char spec[400];
    kvant_codec_info info;
};

/* One codec at a time is enough. */
static kvant_cuda_codec the_codec;
static fake_calls calls;

KVANT_API const fake_calls *fake_cuda_calls(void);

const fake_calls *fake_cuda_calls(void)
{
    return &calls;
}

static void remember(const void *arguments, size_t size, kvant_cuda_stream stream)
{
    memset(calls.arguments, 0, sizeof calls.arguments);
    memcpy(calls.arguments, arguments, size < sizeof calls.arguments ? size : sizeof calls.arguments);
    calls.stream = stream;
}

static kvant_status device_check(char *err, size_t errlen)
{
    snprintf(err, errlen, "no GPU here");
    return KVANT_ERR_UNSUPPORTED;
}

static kvant_status codec_create(const kvant_codec_view *view, kvant_cuda_codec **codec, char *err, size_t errlen)
{
    calls.kind = view->kind;
    if (view->info->head_dim == 80) {
        snprintf(err, errlen, "not on the GPU: head_dim 80");
        return KVANT_ERR_UNSUPPORTED;
    }
    the_codec.info = *view->info;
    snprintf(the_codec.spec, sizeof the_codec.spec, "%s", view->info->spec);
    the_codec.info.spec = the_codec.spec;
    *codec = &the_codec;
    return KVANT_OK;
}

static kvant_status codec_create_open(const kvant_cuda_codec *sealed, kvant_cuda_codec **open)
{
    calls.codec = sealed;
    *open = &the_codec;
    return KVANT_OK;
}

static void codec_free(kvant_cuda_codec **codec)
{
    calls.freed++;
    *codec = NULL;
}

static kvant_status codec_get_info(const kvant_cuda_codec *codec, kvant_codec_info *info)
{
    *info = codec->info;
    return KVANT_OK;
}

static kvant_status append(const kvant_cuda_append_args *args, kvant_cuda_stream stream)
{
    remember(args, args->size, stream);
    return KVANT_ERR_RANGE; /* statuses that none of these functions has of its own */
}

static kvant_status seal(const kvant_cuda_seal_args *args, kvant_cuda_stream stream)
{
    remember(args, args->size, stream);
    return KVANT_ERR_FULL;
}

static kvant_status attention_check(const kvant_cuda_codec *k_codec, const kvant_cuda_codec *v_codec, char *err,
                                    size_t errlen)
{
    calls.codec = k_codec;
    snprintf(err, errlen, "%s", v_codec ? "a pair" : "no codec of values");
    return KVANT_ERR_FORMAT;
}

static size_t attention_workspace(uint32_t head_dim)
{
    return (size_t)head_dim * 3;
}

static kvant_status attention(const kvant_cuda_attention_args *args, kvant_cuda_stream stream)
{
    remember(args, args->size, stream);
    return KVANT_ERR_IO;
}

static void limit_shared_memory(size_t bytes)
{
    calls.shared_limit = bytes;
}

static kvant_status transform_queries(const kvant_cuda_query_args *args, kvant_cuda_stream stream)
{
    remember(args, args->size, stream);
    return KVANT_ERR_NONFINITE;
}

static kvant_status decode(const kvant_cuda_decode_args *args, kvant_cuda_stream stream)
{
    remember(args, args->size, stream);
    return KVANT_ERR_CUDA;
}

static kvant_status copy_blocks(const kvant_cuda_pages *pages, size_t page_bytes, uint32_t n_kv_heads,
                                const int32_t *from, const int32_t *to, uint32_t n, kvant_cuda_stream stream)
{
    remember(pages, sizeof *pages, stream);
    return page_bytes == 16 && n_kv_heads == 2 && from[0] == 5 && to[0] == 6 && n == 1 ? KVANT_ERR_MEMORY
                                                                                       : KVANT_OK;
}

static kvant_status device_current(int *device)
{
    *device = 0;
    return KVANT_OK;
}

static kvant_status memory_new(void **memory, size_t bytes)
{
    *memory = calloc(bytes, 1);
    return *memory ? KVANT_OK : KVANT_ERR_MEMORY;
}

static void memory_free(void *memory)
{
    free(memory);
}

static kvant_status memory_copy(void *to, const void *from, size_t bytes, kvant_cuda_stream stream)
{
    (void)stream;
    memcpy(to, from, bytes);
    return KVANT_OK;
}

static kvant_status memory_read(void *to, const void *from, size_t bytes, kvant_cuda_stream stream)
{
    return memory_copy(to, from, bytes, stream);
}

static kvant_status memory_clear(void *memory, size_t bytes, kvant_cuda_stream stream)
{
    (void)stream;
    memset(memory, 0, bytes);
    return KVANT_OK;
}

static kvant_status largest(const kvant_cuda_numbers *numbers, float *out, kvant_cuda_stream stream)
{
    (void)numbers, (void)stream;
    out[0] = out[1] = 0;
    return KVANT_OK;
}

static kvant_status merge(const kvant_cuda_merge_args *args, kvant_cuda_stream stream)
{
    (void)args, (void)stream;
    return KVANT_OK;
}

KVANT_API kvant_cuda_table_get_fn FAKE_GET;

const kvant_cuda_table *FAKE_GET(void)
{
    static const kvant_cuda_table table = { .version = FAKE_VERSION,
                                            .size = sizeof table,
                                            .view_bytes = FAKE_VIEW,
                                            .info_bytes = sizeof(kvant_codec_info),
#define ENTRY(result, name, parameters) .name = name,
                                            KVANT_CUDA_TABLE_FUNCTIONS(ENTRY)
#undef ENTRY
    };
    return &table;
}

/* table.c - the table of the mock device (host.h), its control and its codecs. The codecs are the
 * codecs of libkvant_cuda (src/cuda/params.c), with the same refusals; their pages hold the CPU's
 * codes. */
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

static struct {
    const kvant_cuda_codec *codec;
    const kvant_codec *source;
} known[256];

host_control host;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void host_note(void *at, const void *value, size_t bytes)
{
    pthread_mutex_lock(&lock);
    memcpy(at, value, bytes);
    pthread_mutex_unlock(&lock);
}

_Static_assert(sizeof(kvant_cuda_kernel_append_args) <= sizeof host.arguments &&
                   sizeof(kvant_cuda_kernel_attention_args) <= sizeof host.arguments,
               "a copy of arguments");

KVANT_API host_control_fn host_control_get;

host_control *host_control_get(void)
{
    return &host;
}

bool host_answers(const char *function, const void *arguments, size_t size,
                  kvant_cuda_stream stream)
{
    pthread_mutex_lock(&lock);
    host.function = function;
    host.stream = stream;
    memset(host.arguments, 0, sizeof host.arguments);
    if (size)
        memcpy(host.arguments, arguments, size);
    pthread_mutex_unlock(&lock);
    return host.answer != KVANT_OK;
}

bool host_is_wrong(const char *function)
{
    const char *wrong = getenv(HOST_WRONG_ENV);
    return wrong && strcmp(wrong, function) == 0;
}

const kvant_codec *host_source(const kvant_cuda_codec *codec)
{
    const kvant_codec *source = NULL;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].codec == codec)
            source = known[i].source;
    pthread_mutex_unlock(&lock);
    if (!source)
        abort();
    return source;
}

/* Puts a codec in the place of another one; NULL stands for no codec. Threads of the plug-in create
 * and free codecs at the same time. */
static void replace(const kvant_cuda_codec *old, const kvant_cuda_codec *codec,
                    const kvant_codec *source)
{
    size_t i = 0;
    pthread_mutex_lock(&lock);
    while (i < sizeof known / sizeof *known && known[i].codec != old)
        i++;
    if (i < sizeof known / sizeof *known) {
        known[i].codec = codec;
        known[i].source = source;
    }
    pthread_mutex_unlock(&lock);
}

static kvant_status know(kvant_status status, const kvant_cuda_codec *codec,
                         const kvant_codec *source)
{
    if (status == KVANT_OK)
        replace(NULL, codec, source);
    return status;
}

void kvant_cuda_tables_free(kvant_cuda_tables_of *tables)
{
    (void)tables; /* there is no device */
}

bool host_is_open(const kvant_cuda_codec *codec)
{
    return codec->params.codes == KVANT_CUDA_CODES_OPEN;
}

kvant_transform host_transform(const kvant_cuda_codec *codec, const float *key_transform,
                               uint32_t head)
{
    kvant_transform t = host_source(codec)->transform;
    const size_t d = t.head_dim, n = !t.key_transform ? 0 : t.diagonal ? d : d * d;
    /* the array is only read */
    t.key_transform = key_transform ? (float *)(uintptr_t)(key_transform + head * n) : NULL;
    if (t.rotate == KVANT_ROTATE_DENSE && !t.key_transform)
        t.rotate =
            KVANT_ROTATE_NONE; /* as in kernels: the caller rotates rows, queries and outputs */
    return t;
}

kvant_status host_device_check(char *err, size_t errlen)
{
    const bool answers = host_answers("device_check", NULL, 0, NULL);
    snprintf(err, errlen, "%s", answers ? host.said : "all is well");
    return host.answer;
}

kvant_status host_codec_create(const kvant_codec_view *view, kvant_cuda_codec **codec, char *err,
                               size_t errlen)
{
    host_note(&host.kind, &view->kind, sizeof host.kind);
    const kvant_status status = kvant_cuda_table_codec_create(view, codec, err, errlen);
    return know(status, *codec,
                (const kvant_codec *)((const char *)view - offsetof(kvant_codec, view)));
}

kvant_status host_codec_create_open(const kvant_cuda_codec *sealed, kvant_cuda_codec **open)
{
    host_note(&host.codec, &sealed, sizeof host.codec);
    const kvant_status status = kvant_cuda_table_codec_create_open(sealed, open);
    return know(status, *open, host_source(sealed));
}

void host_codec_free(kvant_cuda_codec **codec)
{
    if (*codec)
        replace(*codec, NULL, NULL);
    kvant_cuda_table_codec_free(codec);
    host.freed++;
}

kvant_status host_codec_get_info(const kvant_cuda_codec *codec, kvant_codec_info *info)
{
    return kvant_cuda_table_codec_get_info(codec, info);
}

kvant_cuda_table *host_table(void)
{
    static kvant_cuda_table table = { .size = sizeof table,
                                      .info_bytes = sizeof(kvant_codec_info),
#define ENTRY(result, name, parameters) .name = host_##name,
                                      KVANT_CUDA_TABLE_FUNCTIONS(ENTRY)
#undef ENTRY
    };
    table.version = host.version ? host.version : KVANT_CUDA_TABLE_VERSION;
    table.args_bytes = host.args_bytes ? host.args_bytes : KVANT_CUDA_ARGS_BYTES;
    table.view_bytes = host.view_bytes ? host.view_bytes : sizeof(kvant_codec_view);
    return &table;
}

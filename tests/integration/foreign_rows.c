/* foreign_rows.c - stands before a real ggml and makes one thing of it differ, which FOREIGN_ROW
 * names as the plug-in's ggml_tables.c names its rows. Every function here calls the real
 * function. */
#define _GNU_SOURCE /* RTLD_NEXT */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"

enum { N_WORDS = 64 };
typedef uintptr_t word;
typedef word (*function)(word, word, word, word);

static bool chosen(const char *row)
{
    const char *name = getenv("FOREIGN_ROW");

    return name != NULL && strcmp(name, row) == 0;
}

static void real(const char *name, void *slot)
{
    void *symbol = dlsym(RTLD_NEXT, name);

    memcpy(slot, &symbol, sizeof(symbol));
}

/* Whether the plug-in made the object: then the object's first word is a function of the plug-in.
 * ggml calls these functions on its own objects, too. */
static bool is_the_plugins(word object)
{
    void *first = *(void **)object;
    Dl_info info;

    return dladdr(first, &info) != 0 && strstr(info.dli_fname, "libggml-kvant") != NULL;
}

static bool anyone(word object)
{
    return true;
}

/* Calls a function with the object's table moved by one word: the entry of place 5 is at place
 * 4. */
static word moved(function call, word object, word a, word b, word c)
{
    word words[N_WORDS] = { 0 };

    memcpy(words, (const char *)object + sizeof(word), sizeof(words) - sizeof(word));
    return call((word)words, a, b, c);
}

/* Objects of the plug-in have N_WORDS words. */
#define MOVES(name, row)                                                                           \
    word name(word object, word a, word b, word c);                                                \
    word name(word object, word a, word b, word c)                                                 \
    {                                                                                              \
        function call;                                                                             \
                                                                                                   \
        real(#name, &call);                                                                        \
        return chosen(row) && is_the_plugins(object) ? moved(call, object, a, b, c)                \
                                                     : call(object, a, b, c);                      \
    }
/* For objects with fewer words, the function returns 0 and does not call ggml. */
#define SKIPS(name, row, made_by)                                                                  \
    word name(word object, word a, word b, word c);                                                \
    word name(word object, word a, word b, word c)                                                 \
    {                                                                                              \
        function call;                                                                             \
                                                                                                   \
        real(#name, &call);                                                                        \
        return chosen(row) && made_by(object) ? 0 : call(object, a, b, c);                         \
    }

MOVES(ggml_get_data, "tensor: data")
MOVES(ggml_backend_buft_get_device, "buffer type: device")
MOVES(ggml_backend_buft_name, "buffer type: name")
MOVES(ggml_backend_buft_alloc_buffer, "buffer type: alloc_buffer")
MOVES(ggml_backend_buft_get_alignment, "buffer type: alignment")
MOVES(ggml_backend_buft_get_max_size, "buffer type: max_size")
MOVES(ggml_backend_buft_get_alloc_size, "buffer type: alloc_size")
MOVES(ggml_backend_buft_is_host, "buffer type: is_host")
SKIPS(ggml_backend_buffer_set_usage, "buffer: usage", is_the_plugins)
SKIPS(ggml_backend_buffer_get_base, "buffer: get_base", is_the_plugins)
SKIPS(ggml_backend_buffer_init_tensor, "buffer: init_tensor", is_the_plugins)
SKIPS(ggml_backend_buffer_clear, "buffer: clear", is_the_plugins)
SKIPS(ggml_backend_buffer_reset, "buffer: reset", is_the_plugins)
SKIPS(ggml_backend_tensor_memset, "buffer: memset_tensor", anyone)
SKIPS(ggml_backend_tensor_set, "buffer: set_tensor", anyone)
SKIPS(ggml_backend_tensor_get, "buffer: get_tensor", anyone)
SKIPS(ggml_backend_buffer_copy_tensor, "buffer: cpy_tensor", anyone)
SKIPS(ggml_backend_buffer_free, "buffer: free_buffer", is_the_plugins)
MOVES(ggml_backend_guid, "back end: guid")
MOVES(ggml_backend_get_device, "back end: device")
MOVES(ggml_backend_name, "back end: name")
MOVES(ggml_backend_synchronize, "back end: synchronize")
MOVES(ggml_backend_graph_compute_async, "back end: graph_compute")
SKIPS(ggml_backend_event_record, "back end: event_record", anyone)
MOVES(ggml_backend_event_wait, "back end: event_wait")
MOVES(ggml_backend_free, "back end: free")
MOVES(ggml_backend_dev_name, "device: name")
MOVES(ggml_backend_dev_description, "device: description")
MOVES(ggml_backend_dev_memory, "device: memory")
MOVES(ggml_backend_dev_type, "device: type")
MOVES(ggml_backend_dev_init, "device: init_backend")
MOVES(ggml_backend_dev_buffer_type, "device: buffer type")
MOVES(ggml_backend_dev_host_buffer_type, "device: host buffer type")
MOVES(ggml_backend_dev_buffer_from_host_ptr, "device: buffer from memory")
MOVES(ggml_backend_dev_supports_op, "device: supports_op")
MOVES(ggml_backend_dev_supports_buft, "device: supports_buft")
MOVES(ggml_backend_dev_offload_op, "device: offload_op")
MOVES(ggml_backend_dev_backend_reg, "device: registry")
MOVES(ggml_backend_reg_name, "registry: name")
MOVES(ggml_backend_reg_dev_count, "registry: number of devices")
MOVES(ggml_backend_reg_dev_get, "registry: device")
MOVES(ggml_backend_reg_get_proc_address, "registry: address")
SKIPS(ggml_graph_nodes, "graph: nodes", anyone)
SKIPS(ggml_graph_size, "graph: size", anyone)
SKIPS(ggml_graph_n_nodes, "graph: n_nodes", anyone)

/* The functions that follow have ggml's parameters. REAL declares `call` as the real one. */
#define REAL(result, name, ...)                                                                    \
    result name(__VA_ARGS__);                                                                      \
    result name(__VA_ARGS__)
#define CALL(result, name, ...)                                                                    \
    result (*call)(__VA_ARGS__);                                                                   \
    real(#name, &call)

REAL(size_t, ggml_tensor_overhead, void)
{
    CALL(size_t, ggml_tensor_overhead, void);
    return call() + (chosen("size of a tensor") ? 8 : 0);
}

REAL(abi_tensor *, ggml_new_tensor_1d, abi_context *context, int32_t type, int64_t ne0)
{
    CALL(abi_tensor *, ggml_new_tensor_1d, abi_context *, int32_t, int64_t);
    return chosen("tensors in a context of ours") ? NULL : call(context, type, ne0);
}

REAL(abi_buffer *, ggml_backend_alloc_ctx_tensors_from_buft, abi_context *context, abi_buft *buft)
{
    abi_tensor *(*first)(abi_context *of);
    abi_buffer *buffer;
    CALL(abi_buffer *, ggml_backend_alloc_ctx_tensors_from_buft, abi_context *, abi_buft *);

    buffer = call(context, buft);
    real("ggml_get_first_tensor", &first);
    if (chosen("tensor: buffer"))
        first(context)->buffer = NULL;
    return buffer;
}

REAL(const char *, ggml_type_name, int32_t type)
{
    char row[64] = "type ";
    CALL(const char *, ggml_type_name, int32_t);

    strcat(row, call(type));
    return chosen(row) ? "other" : call(type);
}

REAL(abi_tensor *, ggml_new_tensor_3d, abi_context *context, int32_t type, int64_t ne0, int64_t ne1,
     int64_t ne2)
{
    abi_tensor *tensor;
    CALL(abi_tensor *, ggml_new_tensor_3d, abi_context *, int32_t, int64_t, int64_t, int64_t);

    tensor = call(context, type, ne0, ne1, ne2);
    tensor->type += chosen("tensor: type") ? 29 : 0;
    tensor->ne[0] += chosen("tensor: ne[0]");
    tensor->ne[1] += chosen("tensor: ne[1]");
    tensor->ne[3] += chosen("tensor: ne[3]");
    tensor->nb[0] += chosen("tensor: nb[0]");
    tensor->nb[2] += chosen("tensor: nb[2]");
    tensor->op += chosen("tensor: op");
    return tensor;
}

REAL(abi_tensor *, ggml_view_3d, abi_context *context, abi_tensor *a, int64_t ne0, int64_t ne1,
     int64_t ne2, size_t nb1, size_t nb2, size_t offset)
{
    abi_tensor *view;
    CALL(abi_tensor *, ggml_view_3d, abi_context *, abi_tensor *, int64_t, int64_t, int64_t, size_t,
         size_t, size_t);

    view = call(context, a, ne0, ne1, ne2, nb1, nb2, offset);
    view->view_offs += chosen("tensor: view_offs");
    if (chosen("tensor: view_src"))
        view->view_src = NULL;
    return view;
}

REAL(abi_tensor *, ggml_set_name, abi_tensor *tensor, const char *name)
{
    CALL(abi_tensor *, ggml_set_name, abi_tensor *, const char *);
    return call(tensor, chosen("tensor: name") ? "other" : name);
}

/* With the row "operations with the same number", an operation gets the number of the operation
 * that was asked for before it. */
REAL(const char *, ggml_op_desc, abi_tensor *tensor)
{
    static int32_t before;
    const char *desc;
    char row[64] = "operation ";
    CALL(const char *, ggml_op_desc, abi_tensor *);

    desc = call(tensor);
    strcat(row, desc);
    if (chosen("operations with the same number") && strcmp(desc, "TRANSPOSE") == 0)
        tensor->op = before;
    before = tensor->op;
    return chosen(row) ? "other" : desc;
}

static void swap(abi_tensor **sources)
{
    abi_tensor *first = sources[0];

    sources[0] = sources[1];
    sources[1] = first;
}

REAL(void, ggml_flash_attn_ext_add_sinks, abi_tensor *node, abi_tensor *sinks)
{
    CALL(void, ggml_flash_attn_ext_add_sinks, abi_tensor *, abi_tensor *);
    call(node, sinks);
    if (chosen("FLASH_ATTN_EXT: sources in order"))
        swap(&node->src[4]);
    node->op_params[2] += chosen("FLASH_ATTN_EXT: parameters in order");
}

REAL(abi_tensor *, ggml_rope_ext_inplace, abi_context *context, abi_tensor *a, abi_tensor *b,
     abi_tensor *c, int n_dims, int mode, int n_ctx_orig, float base, float scale, float ext,
     float attn, float fast, float slow)
{
    abi_tensor *node;
    CALL(abi_tensor *, ggml_rope_ext_inplace, abi_context *, abi_tensor *, abi_tensor *,
         abi_tensor *, int, int, int, float, float, float, float, float, float);

    node = call(context, a, b, c, n_dims, mode, n_ctx_orig, base, scale, ext, attn, fast, slow);
    node->op_params[1] += chosen("ROPE: n_dims");
    node->op_params[2] += chosen("ROPE: mode");
    node->op_params[4] += chosen("ROPE: n_ctx_orig");
    node->op_params[10] += chosen("ROPE: frequencies in order");
    if (chosen("ROPE: sources in order"))
        swap(&node->src[2]);
    return node;
}

REAL(abi_tensor *, ggml_set_rows, abi_context *context, abi_tensor *a, abi_tensor *b, abi_tensor *c)
{
    abi_tensor *node;
    CALL(abi_tensor *, ggml_set_rows, abi_context *, abi_tensor *, abi_tensor *, abi_tensor *);

    node = call(context, a, b, c);
    if (chosen("SET_ROWS: sources in order"))
        swap(node->src);
    return node;
}

REAL(void, ggml_build_forward_expand, abi_graph *graph, abi_tensor *tensor)
{
    CALL(void, ggml_build_forward_expand, abi_graph *, abi_tensor *);
    call(graph, tensor);
    if (chosen("flag of a node to be computed"))
        tensor->flags = 0;
}

typedef struct wide_iface {
    void *at[32];
} wide_iface;

REAL(abi_buffer *, ggml_backend_buffer_init, abi_buft *buft, wide_iface iface, void *context,
     size_t size)
{
    abi_buffer *buffer;
    CALL(abi_buffer *, ggml_backend_buffer_init, abi_buft *, wide_iface, void *, size_t);

    if (!is_the_plugins((word)&iface))
        return call(buft, iface, context, size);
    if (chosen("buffer: creation"))
        return NULL;
    buffer = call(buft, iface, context, size);
    if (chosen("buffer: functions"))
        buffer->iface.clear = NULL;
    if (chosen("buffer: buffer type"))
        buffer->buft = NULL;
    if (chosen("buffer: context"))
        buffer->context = NULL;
    buffer->size += chosen("buffer: size");
    return buffer;
}

REAL(void, ggml_backend_dev_get_props, word device, abi_device_props *props)
{
    function call;
    static char other[] = "other";

    real("ggml_backend_dev_get_props", &call);
    if (chosen("device: get_props"))
        moved(call, device, (word)props, 0, 0);
    else
        call(device, (word)props, 0, 0);
    if (chosen("size of a device's properties"))
        ((char *)props)[sizeof(*props)] = 0;
    if (chosen("device's properties: name"))
        props->name = other;
    props->type += chosen("device's properties: type");
}

REAL(abi_device *, ggml_backend_dev_by_type, int32_t type)
{
    static abi_device device;
    static abi_reg reg;
    abi_device *found;
    CALL(abi_device *, ggml_backend_dev_by_type, int32_t);

    found = call(type);
    if (found == NULL || !chosen("version of the back-end API"))
        return found;
    memcpy(&device, found, sizeof(device));
    memcpy(&reg, found->reg, sizeof(reg));
    reg.api_version++;
    device.reg = &reg;
    return &device;
}

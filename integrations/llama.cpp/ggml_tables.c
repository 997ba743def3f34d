/* ggml_tables.c - see ggml_tables.h: one row for each thing of ggml's binary interface that the
 * plug-in relies on. A row says how the thing can be observed and what abi.h says about it.
 *
 * A recorder is a function that notes its own place. A table of functions is filled with recorders,
 * and one of ggml's exported functions is called on it. A member that an exported function returns
 * tells its place in the same way. Tensors, operations and graphs are built by ggml and then read.
 * So no version number is trusted here, and ggml calls nothing but recorders.
 *
 * No exported function shows the hash set and the uid of a graph, which only gpu/ reads. None shows
 * a buffer's two functions for strided copies, which the plug-in leaves out.
 *
 * A row that differs ends the search, because the next rows may rest on it.
 */
#include "ggml_tables.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "host.h"

enum { N_PLACES = 32, N_WORDS = 2 * N_PLACES };

/* An object of the plug-in that ggml reads: each word serves as a function or as a pointer. */
typedef void *(*recorder)(void);
typedef void *(*function)(void *object, uintptr_t a, uintptr_t b, uintptr_t c);
typedef struct words {
    recorder at[N_PLACES];
} words;

static int called;    /* the place of the recorder that was called last, or -1 */
static void *returns; /* what recorders return */

#define RECORD(i)                                                                                  \
    static void *record_##i(void)                                                                  \
    {                                                                                              \
        called = i;                                                                                \
        return returns;                                                                            \
    }
/* clang-format off */
#define EACH(X)                                                       \
    X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10)           \
    X(11) X(12) X(13) X(14) X(15) X(16) X(17) X(18) X(19) X(20) X(21) \
    X(22) X(23) X(24) X(25) X(26) X(27) X(28) X(29) X(30) X(31)
/* clang-format on */
#define NAME(i) record_##i,
EACH(RECORD)
static const words recorders = { { EACH(NAME) } };

typedef struct finder {
    void *library;
    kvp_ggml *api;
    char *err;
    size_t errlen;
    bool differs;
    words object[2]; /* larger than any object of ggml's that the plug-in makes */
    abi_context *context;
    abi_tensor *tensor;
    char memory[64]; /* memory of the tensor */
} finder;

static void row(finder *f, const char *what, intmax_t found, intmax_t expected)
{
    if (f->differs)
        return;
    f->api->n_rows++;
    if (found == expected)
        return;
    f->differs = true;
    snprintf(f->err, f->errlen, "%s is %jd there, not %jd", what, found, expected);
}

/* Looks a symbol up. Like ggml_api.c's lookup it avoids a cast from an object pointer to a function
 * pointer, which ISO C does not have. */
static bool find(finder *f, const char *name, void *slot)
{
    void *symbol = kvant_os_symbol(f->library, name);

    memcpy(slot, &symbol, sizeof(symbol));
    if (symbol == NULL && !f->differs) {
        f->differs = true;
        snprintf(f->err, f->errlen, "it does not export %s", name);
    }
    return !f->differs;
}

static int place_of(const void *word)
{
    recorder wanted;

    memcpy(&wanted, &word, sizeof(wanted));
    for (int i = 0; i < N_PLACES; i++)
        if (recorders.at[i] == wanted)
            return i;
    return -1;
}

/* Compares the place in the object whose function ggml's function of this name calls. */
static void calls(finder *f, const char *what, const char *name, void *object, uintptr_t a,
                  uintptr_t b, uintptr_t c, size_t place)
{
    function call;

    called = -1;
    if (!find(f, name, &call))
        return;
    call(object, a, b, c);
    row(f, what, called, (intmax_t)(place / sizeof(void *)));
}

/* Finds the place in the object whose word ggml's function of this name returns. */
static int read_by(finder *f, const char *name)
{
    void *(*get)(void *object);

    return find(f, name, &get) ? place_of(get(f->object)) : -1;
}

static void reads(finder *f, const char *what, const char *name, size_t place)
{
    row(f, what, read_by(f, name), (intmax_t)(place / sizeof(void *)));
}

static void find_types(finder *f)
{
    static const struct {
        int32_t type;
        const char *name, *what;
    } types[] = { { ABI_TYPE_F32, "f32", "type f32" },
                  { ABI_TYPE_F16, "f16", "type f16" },
                  { ABI_TYPE_I32, "i32", "type i32" },
                  { ABI_TYPE_I64, "i64", "type i64" },
                  { ABI_TYPE_BF16, "bf16", "type bf16" } };
    const char *(*type_name)(int32_t type);

    if (!find(f, "ggml_type_name", &type_name))
        return;
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        const char *name = type_name(types[i].type);
        row(f, types[i].what, name != NULL && strcmp(name, types[i].name) == 0 ? types[i].type : -1,
            types[i].type);
    }
}

/* Only data is looked at: reading a wrong offset inside a tensor cannot crash. */
static void find_tensors(finder *f)
{
    abi_tensor *base = f->api->new_tensor_3d(f->context, ABI_TYPE_F16, 32, 8, 2);
    abi_tensor *view =
        f->api->view_3d(f->context, base, 16, 4, 2, base->nb[1], base->nb[2], 2 * base->nb[1]);
    void *(*get_data)(void *tensor);

    f->api->set_name(base, "cache_k_l0");
    row(f, "tensor: type", base->type, ABI_TYPE_F16);
    row(f, "tensor: ne[0]", base->ne[0], 32);
    row(f, "tensor: ne[1]", base->ne[1], 8);
    row(f, "tensor: ne[3]", base->ne[3], 1);
    row(f, "tensor: nb[0]", (intmax_t)base->nb[0], 2);
    row(f, "tensor: nb[2]", (intmax_t)base->nb[2], 512);
    row(f, "tensor: op", base->op, 0);
    row(f, "tensor: view_src", view->view_src == base && base->view_src == NULL, 1);
    row(f, "tensor: view_offs", (intmax_t)view->view_offs, 128);
    row(f, "tensor: name", strcmp(base->name, "cache_k_l0"), 0);
    if (find(f, "ggml_get_data", &get_data))
        row(f, "tensor: data", place_of(get_data(f->object)),
            offsetof(abi_tensor, data) / sizeof(void *));
}

/* ggml gives the tensor a buffer, which shows where a tensor names it. */
static void find_buffer_of_tensor(finder *f)
{
    abi_buffer *(*allocate)(abi_context *context, abi_buft *buft);
    abi_buffer *buffer;

    if (!find(f, "ggml_backend_alloc_ctx_tensors_from_buft", &allocate))
        return;
    buffer = allocate(f->context, f->api->cpu_buffer_type());
    row(f, "tensor: buffer", buffer != NULL && f->tensor->buffer == buffer, 1);
    if (buffer != NULL)
        f->api->buffer_free(buffer);
    f->tensor->buffer = NULL;
    f->tensor->data = NULL;
}

/* The number of the operation, from a node that ggml built for it. Numbers are few, small and
 * different. */
static void operation(finder *f, const char *name, const abi_tensor *node, int32_t *number)
{
    const char *(*desc)(const abi_tensor *tensor);
    char what[64];

    if (!find(f, "ggml_op_desc", &desc))
        return;
    snprintf(what, sizeof(what), "operation %s", name);
    row(f, what, node != NULL && strcmp(desc(node), name) == 0, 1);
    if (!f->differs)
        *number = node->op;
}

static void different_operations(finder *f)
{
    const int32_t numbers[] = { f->api->op.none,      f->api->op.view,
                                f->api->op.permute,   f->api->op.reshape,
                                f->api->op.transpose, f->api->op.rope,
                                f->api->op.set_rows,  f->api->op.flash_attn_ext,
                                f->api->op.mul_mat_id };
    const size_t n = sizeof(numbers) / sizeof(numbers[0]);
    int same = 0;

    for (size_t i = 0; i < n; i++)
        for (size_t j = i + 1; j < n; j++)
            same += numbers[i] == numbers[j];
    row(f, "operations with the same number", same, 0);
}

static void find_views(finder *f)
{
    abi_tensor *(*permute)(abi_context *, abi_tensor *, int, int, int, int);
    abi_tensor *(*reshape)(abi_context *, abi_tensor *, int64_t, int64_t);
    abi_tensor *(*transpose)(abi_context *, abi_tensor *);
    abi_tensor *base = f->api->new_tensor_3d(f->context, ABI_TYPE_F32, 8, 4, 2);

    if (!find(f, "ggml_permute", &permute) || !find(f, "ggml_reshape_2d", &reshape) ||
        !find(f, "ggml_transpose", &transpose))
        return;
    operation(f, "NONE", base, &f->api->op.none);
    operation(f, "VIEW", f->api->view_3d(f->context, base, 8, 4, 1, 32, 128, 0), &f->api->op.view);
    operation(f, "PERMUTE", permute(f->context, base, 0, 2, 1, 3), &f->api->op.permute);
    operation(f, "RESHAPE", reshape(f->context, base, 8, 8), &f->api->op.reshape);
    operation(f, "TRANSPOSE", transpose(f->context, base), &f->api->op.transpose);
}

/* Counts the parameters of the operation that are stored as they were given. */
static int same_numbers(const abi_tensor *node, int first, const float *expected, int n)
{
    float numbers[ABI_MAX_OP_PARAMS / sizeof(float)];
    int same = 0;

    memcpy(numbers, node->op_params, sizeof(numbers));
    for (int i = 0; i < n; i++)
        same += numbers[first + i] >= expected[i] && numbers[first + i] <= expected[i];
    return same;
}

static void find_attention(finder *f)
{
    static const float given[] = { 0.5f, 2.0f, 3.0f };
    abi_tensor *(*attention)(abi_context *, abi_tensor *q, abi_tensor *k, abi_tensor *v,
                             abi_tensor *mask, float, float, float);
    void (*add_sinks)(abi_tensor *node, abi_tensor *sinks);
    abi_tensor *q = f->api->new_tensor_3d(f->context, ABI_TYPE_F32, 64, 2, 4);
    abi_tensor *k = f->api->new_tensor_3d(f->context, ABI_TYPE_F16, 64, 8, 2);
    abi_tensor *v = f->api->new_tensor_3d(f->context, ABI_TYPE_F16, 64, 8, 2);
    abi_tensor *mask = f->api->new_tensor_3d(f->context, ABI_TYPE_F16, 8, 2, 1);
    abi_tensor *sinks = f->api->new_tensor_1d(f->context, ABI_TYPE_F32, 4), *node;

    if (!find(f, "ggml_flash_attn_ext", &attention) ||
        !find(f, "ggml_flash_attn_ext_add_sinks", &add_sinks))
        return;
    node = attention(f->context, q, k, v, mask, given[0], given[1], given[2]);
    add_sinks(node, sinks);
    operation(f, "FLASH_ATTN_EXT", node, &f->api->op.flash_attn_ext);
    row(f, "FLASH_ATTN_EXT: sources in order",
        (node->src[0] == q) + (node->src[1] == k) + (node->src[2] == v) + (node->src[3] == mask) +
            (node->src[4] == sinks),
        5);
    row(f, "FLASH_ATTN_EXT: parameters in order", same_numbers(node, 0, given, 3), 3);
}

static void find_rope(finder *f)
{
    static const float given[] = { 1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f };
    abi_tensor *x = f->api->new_tensor_3d(f->context, ABI_TYPE_F32, 64, 2, 4);
    abi_tensor *position = f->api->new_tensor_1d(f->context, ABI_TYPE_I32, 4);
    abi_tensor *factors = f->api->new_tensor_1d(f->context, ABI_TYPE_F32, 16);
    abi_tensor *node =
        f->api->rope_ext_inplace(f->context, x, position, factors, 32, 2, 77, given[0], given[1],
                                 given[2], given[3], given[4], given[5]);

    operation(f, "ROPE", node, &f->api->op.rope);
    row(f, "ROPE: sources in order",
        (node->src[0] == x) + (node->src[1] == position) + (node->src[2] == factors), 3);
    row(f, "ROPE: n_dims", node->op_params[1], 32);
    row(f, "ROPE: mode", node->op_params[2], 2);
    row(f, "ROPE: n_ctx_orig", node->op_params[4], 77);
    row(f, "ROPE: frequencies in order", same_numbers(node, 5, given, 6), 6);
}

/* The first node is SET_ROWS. Its flag must say that it is to be computed: an older ggml has no
 * such flag and would leave out every node. */
static void find_graphs(finder *f)
{
    abi_tensor *cache = f->api->new_tensor_3d(f->context, ABI_TYPE_F16, 64, 8, 1);
    abi_tensor *rows = f->api->new_tensor_3d(f->context, ABI_TYPE_F32, 64, 3, 1);
    abi_tensor *index = f->api->new_tensor_1d(f->context, ABI_TYPE_I64, 3);
    abi_tensor *node = f->api->set_rows(f->context, cache, rows, index);
    abi_tensor **(*nodes)(abi_graph *graph);
    int (*size)(abi_graph *graph);
    abi_graph *graph = f->api->new_graph(f->context);

    operation(f, "SET_ROWS", node, &f->api->op.set_rows);
    row(f, "SET_ROWS: sources in order",
        (node->view_src == cache) + (node->src[0] == rows) + (node->src[1] == index) +
            (node->src[3] == NULL),
        4);
    if (graph == NULL || !find(f, "ggml_graph_nodes", &nodes) || !find(f, "ggml_graph_size", &size))
        return;
    f->api->build_forward_expand(graph, node);
    row(f, "flag of a node to be computed", node->flags, ABI_TENSOR_FLAG_COMPUTE);
    row(f, "graph: size", graph->size, size(graph));
    row(f, "graph: n_nodes", graph->n_nodes, f->api->graph_n_nodes(graph));
    row(f, "graph: nodes", graph->nodes == nodes(graph), 1);
}

static void find_experts(finder *f)
{
    abi_tensor *(*mul_mat_id)(abi_context *, abi_tensor *experts, abi_tensor *x, abi_tensor *ids);
    abi_tensor *ids = f->api->new_tensor_3d(f->context, ABI_TYPE_I32, 1, 2, 1);

    if (find(f, "ggml_mul_mat_id", &mul_mat_id))
        operation(f, "MUL_MAT_ID",
                  mul_mat_id(f->context, f->api->new_tensor_3d(f->context, ABI_TYPE_F32, 8, 4, 2),
                             f->api->new_tensor_3d(f->context, ABI_TYPE_F32, 8, 1, 2), ids),
                  &f->api->op.mul_mat_id);
}

/* The place of the type's device tells the generation, because API 3 added two functions before
 * it. */
static void find_buffer_type(finder *f)
{
    const size_t device2 = offsetof(abi_buft_2, device), device3 = offsetof(abi_buft_3, device);
    const int device = read_by(f, "ggml_backend_buft_get_device");

    f->api->api = device == (int)(device2 / sizeof(void *)) ? 2 : 3;
    row(f, "buffer type: device", device,
        (intmax_t)((f->api->api == 2 ? device2 : device3) / sizeof(void *)));
#define PLACE(member)                                                                              \
    f->api->api == 2 ? offsetof(abi_buft_2, iface.member) : offsetof(abi_buft_3, iface.member)
    calls(f, "buffer type: name", "ggml_backend_buft_name", f->object, 0, 0, 0, PLACE(get_name));
    calls(f, "buffer type: alloc_buffer", "ggml_backend_buft_alloc_buffer", f->object, 64, 0, 0,
          PLACE(alloc_buffer));
    calls(f, "buffer type: alignment", "ggml_backend_buft_get_alignment", f->object, 0, 0, 0,
          PLACE(get_alignment));
    calls(f, "buffer type: max_size", "ggml_backend_buft_get_max_size", f->object, 0, 0, 0,
          PLACE(get_max_size));
    returns =
        (void *)(uintptr_t)sizeof(f->memory); /* ggml refuses a size that is not the tensor's */
    calls(f, "buffer type: alloc_size", "ggml_backend_buft_get_alloc_size", f->object,
          (uintptr_t)f->tensor, 0, 0, PLACE(get_alloc_size));
    returns = f->memory;
    calls(f, "buffer type: is_host", "ggml_backend_buft_is_host", f->object, 0, 0, 0,
          PLACE(is_host));
#undef PLACE
}

static void find_members_of_buffer(finder *f, abi_buffer *buffer)
{
    void (*set_usage)(abi_buffer *buffer, int32_t usage);
    recorder word = NULL;
    int n = 0;

    while (n < N_PLACES && (memcpy(&word, (char *)buffer + (size_t)n * sizeof(word), sizeof(word)),
                            word == recorders.at[n]))
        n++;
    row(f, "buffer: functions", n, sizeof(abi_buffer_iface) / sizeof(void *));
    if (f->differs || !find(f, "ggml_backend_buffer_set_usage", &set_usage))
        return;
    row(f, "buffer: buffer type", buffer->buft == (void *)f->object, 1);
    row(f, "buffer: context", buffer->context == f->memory, 1);
    row(f, "buffer: size", (intmax_t)buffer->size, sizeof(f->memory));
    set_usage(buffer, ABI_USAGE_COMPUTE);
    row(f, "buffer: usage", buffer->usage, ABI_USAGE_COMPUTE);
}

/* A buffer is leaked unless all of its members are as in abi.h, because only its own table could
 * free it. */
static void find_buffer(finder *f)
{
    /* ggml takes as much of the table as it knows: a caller passes so large a value in memory. */
    abi_buffer *(*init)(void *buft, words iface, void *context, size_t size);
    abi_buffer *b;
    char data[32] = "";

    if (!find(f, "ggml_backend_buffer_init", &init))
        return;
    b = init(f->object, recorders, f->memory, sizeof(f->memory));
    row(f, "buffer: creation", b != NULL, 1);
    if (f->differs)
        return;
    find_members_of_buffer(f, b);
    if (f->differs)
        return;
#define PLACE(member) offsetof(abi_buffer, iface.member)
    calls(f, "buffer: get_base", "ggml_backend_buffer_get_base", b, 0, 0, 0, PLACE(get_base));
    calls(f, "buffer: init_tensor", "ggml_backend_buffer_init_tensor", b, (uintptr_t)f->tensor, 0,
          0, PLACE(init_tensor));
    calls(f, "buffer: clear", "ggml_backend_buffer_clear", b, 0, 0, 0, PLACE(clear));
    calls(f, "buffer: reset", "ggml_backend_buffer_reset", b, 0, 0, 0, PLACE(reset));
    f->tensor->buffer = b;
    f->tensor->data = f->memory;
    calls(f, "buffer: memset_tensor", "ggml_backend_tensor_memset", f->tensor, 0, 0, sizeof(data),
          PLACE(memset_tensor));
    calls(f, "buffer: set_tensor", "ggml_backend_tensor_set", f->tensor, (uintptr_t)data, 0,
          sizeof(data), PLACE(set_tensor));
    calls(f, "buffer: get_tensor", "ggml_backend_tensor_get", f->tensor, (uintptr_t)data, 0,
          sizeof(data), PLACE(get_tensor));
    calls(f, "buffer: cpy_tensor", "ggml_backend_buffer_copy_tensor", f->tensor,
          (uintptr_t)f->tensor, 0, 0, PLACE(cpy_tensor));
    calls(f, "buffer: free_buffer", "ggml_backend_buffer_free", b, 0, 0, 0, PLACE(free_buffer));
#undef PLACE
    f->tensor->buffer = NULL;
    f->tensor->data = NULL;
}

static void find_backend(finder *f)
{
    abi_event event = { (abi_device *)(void *)f->object, f->memory };
    abi_graph *graph = f->api->new_graph(f->context);

#define PLACE(member) offsetof(abi_backend, iface.member)
    reads(f, "back end: guid", "ggml_backend_guid", offsetof(abi_backend, guid));
    reads(f, "back end: device", "ggml_backend_get_device", offsetof(abi_backend, device));
    calls(f, "back end: name", "ggml_backend_name", f->object, 0, 0, 0, PLACE(get_name));
    calls(f, "back end: synchronize", "ggml_backend_synchronize", f->object, 0, 0, 0,
          PLACE(synchronize));
    calls(f, "back end: graph_compute", "ggml_backend_graph_compute_async", f->object,
          (uintptr_t)graph, 0, 0, PLACE(graph_compute));
    calls(f, "back end: event_record", "ggml_backend_event_record", &event, (uintptr_t)f->object, 0,
          0, PLACE(event_record));
    calls(f, "back end: event_wait", "ggml_backend_event_wait", f->object, (uintptr_t)&event, 0, 0,
          PLACE(event_wait));
    calls(f, "back end: free", "ggml_backend_free", f->object, 0, 0, 0, PLACE(free));
#undef PLACE
}

/* ggml clears the properties before it asks for them, as far as it thinks they go. */
static void find_properties(finder *f)
{
    unsigned char room[512];
    int n = sizeof(room);

    memset(room, 0x5a, sizeof(room));
    calls(f, "device: get_props", "ggml_backend_dev_get_props", f->object, (uintptr_t)room, 0, 0,
          offsetof(abi_device, iface.get_props));
    while (n > 0 && room[n - 1] == 0x5a)
        n--;
    row(f, "size of a device's properties", n, sizeof(abi_device_props));
}

static void find_device(finder *f)
{
    const uintptr_t memory = (uintptr_t)f->memory, tensor = (uintptr_t)f->tensor;
    size_t unused[2];

#define PLACE(member) offsetof(abi_device, iface.member)
    calls(f, "device: name", "ggml_backend_dev_name", f->object, 0, 0, 0, PLACE(get_name));
    calls(f, "device: description", "ggml_backend_dev_description", f->object, 0, 0, 0,
          PLACE(get_description));
    calls(f, "device: memory", "ggml_backend_dev_memory", f->object, (uintptr_t)&unused[0],
          (uintptr_t)&unused[1], 0, PLACE(get_memory));
    calls(f, "device: type", "ggml_backend_dev_type", f->object, 0, 0, 0, PLACE(get_type));
    find_properties(f);
    calls(f, "device: init_backend", "ggml_backend_dev_init", f->object, 0, 0, 0,
          PLACE(init_backend));
    calls(f, "device: buffer type", "ggml_backend_dev_buffer_type", f->object, 0, 0, 0,
          PLACE(get_buffer_type));
    calls(f, "device: host buffer type", "ggml_backend_dev_host_buffer_type", f->object, 0, 0, 0,
          PLACE(get_host_buffer_type));
    calls(f, "device: buffer from memory", "ggml_backend_dev_buffer_from_host_ptr", f->object,
          memory, sizeof(f->memory), 0, PLACE(buffer_from_host_ptr));
    calls(f, "device: supports_op", "ggml_backend_dev_supports_op", f->object, tensor, 0, 0,
          PLACE(supports_op));
    calls(f, "device: supports_buft", "ggml_backend_dev_supports_buft", f->object,
          (uintptr_t)f->object, 0, 0, PLACE(supports_buft));
    calls(f, "device: offload_op", "ggml_backend_dev_offload_op", f->object, tensor, 0, 0,
          PLACE(offload_op));
#undef PLACE
    reads(f, "device: registry", "ggml_backend_dev_backend_reg", offsetof(abi_device, reg));
}

static void find_registry(finder *f)
{
    static char no_name[] = "";

#define PLACE(member) offsetof(abi_reg, iface.member)
    calls(f, "registry: name", "ggml_backend_reg_name", f->object, 0, 0, 0, PLACE(get_name));
    calls(f, "registry: number of devices", "ggml_backend_reg_dev_count", f->object, 0, 0, 0,
          PLACE(get_device_count));
    calls(f, "registry: device", "ggml_backend_reg_dev_get", f->object, 0, 0, 0, PLACE(get_device));
    calls(f, "registry: address", "ggml_backend_reg_get_proc_address", f->object,
          (uintptr_t)no_name, 0, 0, PLACE(get_proc_address));
#undef PLACE
}

/* Compares the CPU's own device, where it is loaded before the plug-in. */
static void find_cpu(finder *f)
{
    abi_device *cpu = f->api->dev_by_type != NULL ? f->api->dev_by_type(ABI_DEVICE_CPU) : NULL;
    void (*get_props)(abi_device *device, abi_device_props *props);
    const char *(*name)(abi_device *device);
    abi_device_props props = { .type = -1 };

    if (f->differs || cpu == NULL || !find(f, "ggml_backend_dev_get_props", &get_props) ||
        !find(f, "ggml_backend_dev_name", &name))
        return;
    get_props(cpu, &props);
    row(f, "device's properties: name", props.name != NULL && strcmp(props.name, name(cpu)) == 0,
        1);
    row(f, "device's properties: type", props.type, ABI_DEVICE_CPU);
    row(f, "version of the back-end API", cpu->reg->api_version, f->api->api);
}

bool kvp_ggml_tables_match(void *library, kvp_ggml *api, char *err, size_t errlen)
{
    /* ggml counts a header of 32 bytes for each object of a context. */
    const size_t overhead = sizeof(abi_tensor) + 32;
    const abi_init_params params = { .mem_size = 64 * overhead + 4 * api->graph_overhead(),
                                     .no_alloc = true };
    static void (*const finders[])(finder *f) = {
        find_types,   find_tensors, find_views,           find_attention,   find_rope,
        find_graphs,  find_experts, different_operations, find_buffer_type, find_buffer,
        find_backend, find_device,  find_registry,        find_cpu,
    };
    finder f = { .library = library,
                 .api = api,
                 .err = err,
                 .errlen = errlen,
                 .object = { recorders, recorders } };

    returns = f.memory;
    row(&f, "size of a tensor", (intmax_t)api->tensor_overhead() - 32, sizeof(abi_tensor));
    if (f.differs)
        return false;
    f.context = api->init(params);
    f.tensor = f.context != NULL
                   ? api->new_tensor_1d(f.context, ABI_TYPE_F32, sizeof(f.memory) / sizeof(float))
                   : NULL;
    row(&f, "tensors in a context of ours", f.tensor != NULL, 1);
    if (f.tensor != NULL)
        find_buffer_of_tensor(&f);
    for (size_t i = 0; i < sizeof(finders) / sizeof(finders[0]) && !f.differs; i++)
        finders[i](&f);
    if (f.context != NULL)
        api->free(f.context);
    return !f.differs;
}

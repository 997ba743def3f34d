/* ops_rope.c - the context shift: llama.cpp rotates cached keys in place when it drops the start of
 * a context. In the computer's memory the keys' codes do not change: the tensor notes by how much
 * each key moved (kvant_tensor_shift), which costs no quantisation. Most codes on a GPU do not
 * change either (gpu/shift.c). With other keys on a GPU, and with a RoPE that the tensor does not
 * know (rope.h), cells whose position changes are decoded, rotated and encoded again. Each round
 * costs one more quantisation. The process's own CPU back end computes the rotation: the node is
 * rebuilt on f32 rows. So every RoPE variant of llama.cpp uses the code that rotated the keys
 * first.
 */
#include <stdlib.h>
#include <string.h>

#include "buffer.h"
#include "ggml_api.h"
#include "log.h"
#include "ops.h"
#include "rope.h"
#include "trace.h"

/* Rows of one round trip through the CPU back end. */
#define BATCH_CELLS 256
_Static_assert(BATCH_CELLS <= KVP_MOST_CELLS, "kvp_kv_write_rows writes them at once");

static bool have_cpu_backend(void)
{
    return kvp_api.dev_by_type != NULL && kvp_api.dev_init != NULL &&
           kvp_api.dev_by_type(ABI_DEVICE_CPU) != NULL;
}

/* The node rotates ne[0] numbers of each head, from view_offs on, for every cell of every
 * stream. */
static bool rotates_all_cells(const abi_tensor *node)
{
    const abi_tensor *root = kvp_root(node), *position = node->src[1], *factors = node->src[2];
    size_t head_bytes = node->nb[1];

    return node->nb[0] == sizeof(uint16_t) && head_bytes != 0 && root->nb[1] % head_bytes == 0 &&
           (size_t)node->ne[1] == root->nb[1] / head_bytes && node->nb[2] == root->nb[1] &&
           node->ne[2] == root->ne[1] * root->ne[2] && node->ne[3] == 1 &&
           node->view_offs + (size_t)node->ne[0] * sizeof(uint16_t) <= head_bytes &&
           position->type == ABI_TYPE_I32 && position->ne[0] == node->ne[2] &&
           (factors == NULL || factors->type == ABI_TYPE_F32);
}

bool kvp_rope_supported(const abi_tensor *node)
{
    if (!kvp_is_kv(node) || kvp_root(node) != kvp_root(node->src[0]))
        return false;
    if (rotates_all_cells(node) && have_cpu_backend())
        return true;
    kvp_error("%s: the context cannot be shifted here (%s); run with --no-context-shift",
              kvp_root(node)->name,
              have_cpu_backend() ? "the RoPE does not cover all cells"
                                 : "the program exports no CPU back end");
    return false;
}

static bool open_cpu_backend(kvp_compute *compute)
{
    void (*set_n_threads)(abi_backend *backend, int n_threads) = NULL;
    abi_device *device = kvp_api.dev_by_type(ABI_DEVICE_CPU);

    if (compute->cpu == NULL)
        compute->cpu = kvp_api.dev_init(device, NULL);
    if (compute->cpu == NULL)
        return false;
    if (kvp_api.dev_backend_reg != NULL && kvp_api.reg_get_proc_address != NULL) {
        void *symbol = kvp_api.reg_get_proc_address(kvp_api.dev_backend_reg(device),
                                                    "ggml_backend_set_n_threads");
        memcpy(&set_n_threads, &symbol, sizeof(symbol));
    }
    if (set_n_threads != NULL)
        set_n_threads(compute->cpu,
                      /* spins, because the lender's threads wait by spinning for the next node */
                      1);
    return true;
}

/* The cells that move in one round trip, as rows and positions. */
struct moved {
    int64_t n;
    float *rows;
    int32_t positions[BATCH_CELLS];
    int64_t cells[BATCH_CELLS];
};

/* Builds the node again for the decoded rows: the same operation and parameters, n cells. */
static abi_tensor *rebuild_node(abi_context *context, const abi_tensor *node, struct moved *moved)
{
    const abi_tensor *factors = node->src[2];
    int64_t head_dim = (int64_t)(node->nb[1] / sizeof(uint16_t)), heads = node->ne[1];
    size_t head_bytes = (size_t)head_dim * sizeof(float);
    abi_tensor *rows = kvp_api.new_tensor_3d(context, ABI_TYPE_F32, head_dim, heads, moved->n);
    abi_tensor *position = kvp_api.new_tensor_1d(context, ABI_TYPE_I32, moved->n);
    abi_tensor *factor =
        factors ? kvp_api.new_tensor_1d(context, ABI_TYPE_F32, factors->ne[0]) : NULL;
    abi_tensor *view, *rope;

    rows->data = moved->rows;
    position->data = moved->positions;
    if (factor != NULL)
        factor->data = factors->data;
    view = kvp_api.view_3d(context, rows, node->ne[0], heads, moved->n, head_bytes,
                           head_bytes * (size_t)heads,
                           node->view_offs / sizeof(uint16_t) * sizeof(float));
    rope = kvp_api.rope_ext_inplace(context, view, position, factor, node->op_params[1],
                                    node->op_params[2], 0, 1.0f, 1.0f, 0.0f, 1.0f, 0.0f, 0.0f);
    memcpy(rope->op_params, node->op_params, sizeof(rope->op_params));
    return rope;
}

static int32_t rotate(const kvp_compute *compute, const abi_tensor *node, struct moved *moved)
{
    abi_init_params params = { .mem_size =
                                   16 * kvp_api.tensor_overhead() + kvp_api.graph_overhead(),
                               .no_alloc = true };
    abi_context *context = kvp_api.init(params);
    abi_graph *graph;
    int32_t status;

    if (context == NULL)
        return ABI_STATUS_ALLOC_FAILED;
    graph = kvp_api.new_graph(context);
    kvp_api.build_forward_expand(graph, rebuild_node(context, node, moved));
    status = kvp_api.graph_compute(compute->cpu, graph);
    kvp_api.free(context);
    return status;
}

/* The number of cells from `first` on that move and have rows, at most `most`. */
static int64_t count_moving(const kvp_kv *kv, const int32_t *shift, int64_t first, int64_t most)
{
    int64_t n = 0;

    while (n < most && shift[first + n] != 0 && kvp_kv_slot(kv, first + n) >= 0)
        n++;
    return n;
}

/* Finds the next cells that move, from *cell on, and decodes them. Cells in a row are decoded
 * together, because a GPU decodes a block and waits for it in each call. */
static kvant_status collect(const kvp_kv *kv, const int32_t *shift, int64_t n_cells, int64_t *cell,
                            struct moved *moved)
{
    kvant_status status = KVANT_OK;

    for (moved->n = 0; *cell < n_cells && moved->n < BATCH_CELLS && status == KVANT_OK;) {
        const int64_t room = BATCH_CELLS - moved->n, left = n_cells - *cell;
        const int64_t n = count_moving(kv, shift, *cell, room < left ? room : left);
        if (n > 0)
            status = kvp_kv_read_rows(kv, (size_t)*cell, (size_t)n,
                                      moved->rows + moved->n * kv->shape.row);
        for (int64_t i = 0; i < n; i++, moved->n++) {
            moved->cells[moved->n] = *cell + i;
            moved->positions[moved->n] = shift[*cell + i];
        }
        *cell += n > 0 ? n : 1;
    }
    return status;
}

static int32_t shift_cells(kvp_compute *compute, const abi_tensor *node, kvp_kv *kv,
                           struct moved *moved)
{
    const int32_t *shift = node->src[1]->data;
    int64_t cell = 0;

    while (cell < node->ne[2]) {
        kvant_status status = collect(kv, shift, node->ne[2], &cell, moved);
        if (status == KVANT_OK && moved->n > 0) {
            if (rotate(compute, node, moved) != ABI_STATUS_SUCCESS)
                return ABI_STATUS_FAILED;
            status = kvp_kv_write_rows(kv, moved->cells, (size_t)moved->n, moved->rows,
                                       compute->n_threads);
        }
        if (status != KVANT_OK) {
            kvp_error("%s: cannot shift the context: %s", kv->name, kvant_strerror(status));
            return ABI_STATUS_FAILED;
        }
    }
    return ABI_STATUS_SUCCESS;
}

/* The distance by which the key of each slot moves; NULL without memory. Slots without a cell get
 * any distance, because nobody reads them. */
static int32_t *shifts_of_slots(const kvp_kv *kv, const int32_t *shift, int64_t n_cells,
                                size_t n_slots)
{
    int32_t *by = malloc(n_slots * sizeof(*by));

    for (size_t i = 0; by != NULL && i < n_slots; i++)
        by[i] = KVANT_ANY_SHIFT;
    for (int64_t cell = 0; by != NULL && cell < n_cells; cell++) {
        const int64_t slot = kvp_kv_slot(kv, cell);
        if (slot >= 0)
            by[slot] = shift[cell];
    }
    return by;
}

/* Shifts the keys and leaves their codes unchanged. False when cells have to be encoded again. */
static bool shift_slots(const kvp_compute *compute, const abi_tensor *node, const kvp_kv *kv)
{
    kvant_tensor_info info = { .size = sizeof(info) };
    float frequencies[KVANT_MAX_HEAD_DIM / 2];
    kvant_rope rope;
    kvant_status status = KVANT_ERR_UNSUPPORTED;
    size_t n_slots;
    int32_t *by;

    if (kv->tensor == NULL || !kvp_rope_of_shift(kv, node, &rope, frequencies) ||
        kvant_tensor_get_info(kv->tensor, &info) != KVANT_OK)
        return false;
    n_slots = (size_t)info.n_blocks * KVANT_PAGE_TOKENS;
    by = shifts_of_slots(kv, node->src[1]->data, node->ne[2], n_slots);
    if (by != NULL)
        status = kvant_tensor_shift(kv->tensor, &rope, by, n_slots, compute->n_threads);
    free(by);
    return status == KVANT_OK;
}

int32_t kvp_rope(kvp_compute *compute, abi_tensor *node)
{
    kvp_kv *kv = kvp_kv_of(node);
    struct moved *moved;
    int32_t status;

    if (kv == NULL || !kvp_kv_is_bound(kv))
        return ABI_STATUS_SUCCESS; /* nothing was ever stored */
    if (kvp_trace_is_on)
        kvp_trace_shift(kv, node->src[1]->data, (size_t)node->ne[2]);
    status = kvp_kv_flush(kv, NULL, compute->n_threads) == KVANT_OK ? ABI_STATUS_SUCCESS
                                                                    : ABI_STATUS_FAILED;
    if (status == ABI_STATUS_SUCCESS && shift_slots(compute, node, kv))
        return ABI_STATUS_SUCCESS;
    if (status != ABI_STATUS_SUCCESS || !open_cpu_backend(compute)) {
        kvp_error("%s: cannot shift the context: %s", kv->name,
                  status == ABI_STATUS_SUCCESS ? "the CPU back end does not start"
                                               : "new rows cannot be stored");
        return ABI_STATUS_FAILED;
    }
    moved = malloc(sizeof(*moved));
    if (moved == NULL)
        return ABI_STATUS_ALLOC_FAILED;
    moved->rows = malloc((size_t)BATCH_CELLS * kv->shape.row * sizeof(float));
    status = moved->rows != NULL ? shift_cells(compute, node, kv, moved) : ABI_STATUS_ALLOC_FAILED;
    free(moved->rows);
    free(moved);
    return status;
}

void kvp_clip_shift(abi_tensor *node, int64_t room)
{
    abi_tensor *const of[2] = { node, node->src[0] };

    for (int i = 0; i < 2; i++)
        of[i]->ne[2] = of[i]->ne[2] > room ? room : of[i]->ne[2];
    node->src[1]->ne[0] = node->ne[2];
}

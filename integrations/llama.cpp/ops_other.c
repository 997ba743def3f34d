/* ops_other.c - operations on cache tensors that no device computes, and views of cache tensors.
 *
 * llama.cpp cannot be told of a refusal while it creates a context, and ggml aborts where a cache
 * tensor cannot be written. So a device accepts such an operation and refuses the context, whose
 * creation fails when the operation's result asks for memory (buffer.c). */
#include "buffer.h"
#include "ggml_api.h"
#include "ops.h"

/* Whether the cache is only planned. A planned cache has no cells, and its memory has no
 * address. */
static bool only_planned(const abi_tensor *node)
{
    const abi_tensor *root = kvp_root(node);

    return root->buffer != NULL && root->buffer->size == 0 && kvp_is_ours(root->buffer->buft);
}

/* llama.cpp reads a cache as [head_dim, kv heads, cells, streams], whatever operation follows. */
static bool shows_heads(const abi_tensor *view)
{
    const abi_tensor *root = kvp_root(view);

    return view->op == kvp_api.op.view && view->ne[2] > 1 &&
           view->ne[0] * view->ne[1] == root->ne[0] && view->nb[0] == sizeof(uint16_t) &&
           view->nb[1] == (size_t)view->ne[0] * sizeof(uint16_t) && view->nb[2] == root->nb[1];
}

bool kvp_is_cache_view(const abi_tensor *node)
{
    kvp_kv *kv = kvp_kv_of(node);

    if (kvp_is_view(node) && kv != NULL && !kvp_kv_is_bound(kv) && shows_heads(node))
        kvp_kv_bind(kv, (uint32_t)node->ne[0]);
    return kvp_is_view(node);
}

/* Whether a reader of a cache has to be refused. All other readers get decoded copies, which ggml
 * makes. */
static bool refused_reader(const abi_tensor *source)
{
    kvp_kv *kv = source != NULL ? kvp_kv_of(source) : NULL;

    if (kv != NULL && !kvp_kv_refused())
        kvp_kv_note_copies(kv);
    return kv != NULL && kvp_kv_refused();
}

bool kvp_is_unserved(const abi_tensor *node)
{
    bool unserved = only_planned(node);

    if (!unserved && kvp_kv_of(node) != NULL) {
        kvp_kv_refuse(kvp_kv_of(node),
                      "operation %s that writes to a compressed cache is not supported; leave out "
                      "--device KVANT, and report the model",
                      kvp_api.op_name(node->op));
        unserved = true;
    }
    for (int i = 0; i < ABI_MAX_SRC; i++)
        unserved = refused_reader(node->src[i]) || unserved;
    return unserved;
}

bool kvp_is_refused(const abi_tensor *node)
{
    const kvp_kv *kv = kvp_kv_of(node);

    return kv != NULL && kvp_kv_is_refused(kv);
}

bool kvp_plans_keys_only(const abi_tensor *node)
{
    const bool single_position = node->op == kvp_api.op.flash_attn_ext &&
                                 only_planned(node->src[1]) &&
                                 kvp_root(node->src[1]) == kvp_root(node->src[2]);

    if (single_position)
        kvp_kv_plan_keys_only();
    return single_position;
}

void kvp_note_other_cache(const abi_tensor *node)
{
    const abi_tensor *root = kvp_root(node);

    if (node->op == kvp_api.op.set_rows && root->buffer != NULL && kvp_kv_is_cache_tensor(root) &&
        !kvp_is_kv(root))
        kvp_kv_note_elsewhere();
}

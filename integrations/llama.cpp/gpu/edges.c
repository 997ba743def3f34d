/* edges.c - straightens a captured graph.
 *
 * ggml-cuda's stream and ours wait for each other, so a captured graph has all of its nodes in one order, and beside the
 * edges from each node to the next one others that say nothing new. A GPU starts a node with one predecessor sooner, and
 * soonest one that begins before its predecessor ends (programmatic dependent launch). */
#include "gpu.h"

#include <stdlib.h>
#include <string.h>

#include "../log.h"

typedef struct edges {
    size_t n, n_nodes;
    cu_node *from, *to;
    cu_edge_data *data;
    cu_node *nodes;           /* sorted */
    uint32_t *waits, *order;  /* by node: predecessors; its place in the order */
    const char **names;       /* by node: a kernel's, else NULL */
} edges;

static int compare(const void *a, const void *b)
{
    const uintptr_t x = (uintptr_t) * (cu_node const *)a, y = (uintptr_t) * (cu_node const *)b;

    return (x > y) - (x < y);
}

static size_t index_of(const edges *e, cu_node node)
{
    const cu_node *found = bsearch(&node, e->nodes, e->n_nodes, sizeof(node), compare);

    return (size_t)(found - e->nodes);
}

static void release(edges *e)
{
    free(e->from);
    free(e->to);
    free(e->data);
    free(e->nodes);
    free(e->waits);
    free(e->order);
    free(e->names);
}

static bool make(edges *e, size_t n)
{
    e->from = malloc(n * sizeof(cu_node));
    e->to = malloc(n * sizeof(cu_node));
    e->data = malloc(n * sizeof(cu_edge_data));
    return e->from != NULL && e->to != NULL && e->data != NULL;
}

static const char *name_of(cu_node node)
{
    cu_kernel_params params = { 0 };
    const char *name = NULL;
    int type = 0;

    if (kvp_cu.node_type(node, &type) != 0 || type != CU_NODE_KERNEL || kvp_cu.kernel_params(node, &params) != 0)
        return NULL;
    if (params.function != NULL ? kvp_cu.function_name(&name, params.function) : kvp_cu.kernel_name(&name, params.kernel))
        return NULL;
    return name;
}

static bool load(cu_graph graph, edges *e)
{
    if (kvp_cu.edges == NULL || kvp_cu.edges_remove == NULL || kvp_cu.edges_add == NULL || kvp_cu.kernel_params == NULL ||
        kvp_cu.function_name == NULL || kvp_cu.kernel_name == NULL ||
        kvp_cu.edges(graph, NULL, NULL, NULL, &e->n) != 0 || e->n == 0)
        return false;
    e->nodes = malloc(2 * e->n * sizeof(cu_node));
    e->waits = calloc(2 * e->n, sizeof(*e->waits));
    e->order = calloc(2 * e->n, sizeof(*e->order));
    e->names = calloc(2 * e->n, sizeof(*e->names));
    if (!make(e, e->n) || e->nodes == NULL || e->waits == NULL || e->order == NULL || e->names == NULL ||
        kvp_cu.edges(graph, e->from, e->to, e->data, &e->n) != 0)
        return false;
    memcpy(e->nodes, e->from, e->n * sizeof(cu_node));
    memcpy(e->nodes + e->n, e->to, e->n * sizeof(cu_node));
    qsort(e->nodes, 2 * e->n, sizeof(cu_node), compare);
    for (size_t i = 0; i < 2 * e->n; i++)
        if (e->n_nodes == 0 || e->nodes[i] != e->nodes[e->n_nodes - 1])
            e->nodes[e->n_nodes++] = e->nodes[i];
    for (size_t i = 0; i < e->n_nodes; i++)
        e->names[i] = name_of(e->nodes[i]);
    return true;
}

/* Gives every node its place; false: two nodes have no order between them. */
static bool put_in_order(edges *e)
{
    size_t at = 0, next = e->n_nodes;

    for (size_t i = 0; i < e->n; i++)
        e->waits[index_of(e, e->to[i])]++;
    for (size_t i = 0; i < e->n_nodes; i++)
        if (e->waits[i] == 0) {
            if (next != e->n_nodes)
                return false;
            next = i;
        }
    for (; next < e->n_nodes; at++) {
        const cu_node node = e->nodes[next];
        e->order[next] = (uint32_t)at;
        next = e->n_nodes;
        for (size_t i = 0; i < e->n; i++) {
            if (e->from[i] != node || --e->waits[index_of(e, e->to[i])] > 0)
                continue;
            if (next != e->n_nodes)
                return false;
            next = index_of(e, e->to[i]);
        }
    }
    return at == e->n_nodes;
}

static bool is_next(const edges *e, size_t i)
{
    return e->order[index_of(e, e->to[i])] == e->order[index_of(e, e->from[i])] + 1;
}

static const char *to_of(const edges *e, size_t i)
{
    return e->names[index_of(e, e->to[i])];
}

/* An edge that lets a kernel of this name begin before its predecessor ends, which says that such kernels wait
 * themselves for what they need; NULL: there is none. Our first kernel of a layer never has one, as it follows a change
 * of stream; it waits where our others do. */
static const cu_edge_data *early_edge(const edges *e, const char *name)
{
    const bool ours = strstr(name, "append_few_kernel") != NULL;

    for (size_t i = 0; i < e->n; i++) {
        const char *other = e->data[i].type == CU_EDGE_EARLY ? to_of(e, i) : NULL;
        if (other != NULL && (strcmp(other, name) == 0 || (ours && strstr(other, "5kvant") != NULL)))
            return &e->data[i];
    }
    return NULL;
}

/* Behind a change of stream a kernel may begin early, too: the new kind of its edge, or NULL. */
static const cu_edge_data *early_of(const edges *e, size_t i)
{
    const char *name = to_of(e, i);

    if (e->data[i].type == CU_EDGE_EARLY || name == NULL || e->names[index_of(e, e->from[i])] == NULL || getenv("KVANT_LATE"))
        return NULL;
    return early_edge(e, name);
}

/* Adds edge i to another list. */
static void move(const edges *e, size_t i, edges *to, const cu_edge_data *data)
{
    to->from[to->n] = e->from[i];
    to->to[to->n] = e->to[i];
    to->data[to->n++] = *data;
}

/* Edges of the new kind or, where the driver takes none, of the old one. */
static bool add(cu_graph graph, edges *e)
{
    if (e->n == 0 || kvp_cu.edges_add(graph, e->from, e->to, e->data, e->n) == 0)
        return true;
    memset(e->data, 0, e->n * sizeof(*e->data));
    return kvp_cu_ok(kvp_cu.edges_add(graph, e->from, e->to, e->data, e->n), "its graph");
}

bool kvp_gpu_straighten(cu_graph graph)
{
    edges e = { 0 }, old = { 0 }, early = { 0 };
    bool ok = true;

    if (load(graph, &e) && put_in_order(&e) && make(&old, e.n) && make(&early, e.n)) {
        for (size_t i = 0; i < e.n; i++) {
            const cu_edge_data *data = is_next(&e, i) ? early_of(&e, i) : NULL;
            if (data != NULL)
                move(&e, i, &early, data);
            if (data != NULL || !is_next(&e, i))
                move(&e, i, &old, &e.data[i]);
        }
        ok = (old.n == 0 || kvp_cu_ok(kvp_cu.edges_remove(graph, old.from, old.to, old.data, old.n), "its graph")) &&
             add(graph, &early);
        size_t early_before = 0, named = 0;
        for (size_t i = 0; i < e.n; i++)
            early_before += e.data[i].type == CU_EDGE_EARLY;
        for (size_t i = 0; i < e.n_nodes; i++)
            named += e.names[i] != NULL;
        kvp_note("a graph of %zu nodes: %zu edges removed, %zu nodes begin early now (%zu before, %zu named)", e.n_nodes,
                 old.n - early.n, early.n, early_before, named);
    }
    release(&e);
    release(&old);
    release(&early);
    return ok;
}

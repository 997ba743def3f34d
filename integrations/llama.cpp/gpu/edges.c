/* edges.c - straightens a captured graph.
 *
 * The streams of ggml-cuda and of the plug-in wait for each other, so all nodes of a captured graph
 * are in one order. The graph has an edge from each node to the next, and further edges that say
 * nothing new. A GPU starts a node with a single predecessor sooner. */
#include "gpu.h"

#include <stdlib.h>
#include <string.h>

#include "../log.h"

typedef struct edges {
    size_t n, n_nodes;
    cu_node *from, *to;
    cu_edge_data *data;
    cu_node *nodes;          /* sorted */
    uint32_t *waits, *order; /* by node: its number of predecessors; its place in the order */
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
}

static bool make(edges *e, size_t n)
{
    e->from = malloc(n * sizeof(cu_node));
    e->to = malloc(n * sizeof(cu_node));
    e->data = malloc(n * sizeof(cu_edge_data));
    return e->from != NULL && e->to != NULL && e->data != NULL;
}

static bool load(cu_graph graph, edges *e)
{
    if (kvp_cu.edges == NULL || kvp_cu.edges_remove == NULL ||
        kvp_cu.edges(graph, NULL, NULL, NULL, &e->n) != 0 || e->n == 0)
        return false;
    e->nodes = malloc(2 * e->n * sizeof(cu_node));
    e->waits = calloc(2 * e->n, sizeof(*e->waits));
    e->order = calloc(2 * e->n, sizeof(*e->order));
    if (!make(e, e->n) || e->nodes == NULL || e->waits == NULL || e->order == NULL ||
        kvp_cu.edges(graph, e->from, e->to, e->data, &e->n) != 0)
        return false;
    memcpy(e->nodes, e->from, e->n * sizeof(cu_node));
    memcpy(e->nodes + e->n, e->to, e->n * sizeof(cu_node));
    qsort(e->nodes, 2 * e->n, sizeof(cu_node), compare);
    for (size_t i = 0; i < 2 * e->n; i++)
        if (e->n_nodes == 0 || e->nodes[i] != e->nodes[e->n_nodes - 1])
            e->nodes[e->n_nodes++] = e->nodes[i];
    return true;
}

/* Gives every node its place in the order; false when two nodes have no order between them. */
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

bool kvp_gpu_straighten(cu_graph graph)
{
    edges e = { 0 };
    size_t n = 0;
    bool ok = true;

    if (load(graph, &e) && put_in_order(&e)) {
        for (size_t i = 0; i < e.n; i++) {
            if (is_next(&e, i))
                continue;
            e.from[n] = e.from[i];
            e.to[n] = e.to[i];
            e.data[n++] = e.data[i];
        }
        ok = n == 0 || kvp_cu_ok(kvp_cu.edges_remove(graph, e.from, e.to, e.data, n),
                                 "removing edges of a graph");
        kvp_note("a graph of %zu nodes: %zu edges removed", e.n_nodes, n);
    }
    release(&e);
    return ok;
}

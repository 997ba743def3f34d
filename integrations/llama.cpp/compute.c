/* compute.c - the objects that a back end instance owns between graphs (ops.h). */
#include <stdlib.h>

#include "ggml_api.h"
#include "ops.h"

void *kvp_compute_workspace(kvp_compute *compute, size_t bytes)
{
    size_t rounded = (bytes + 63) / 64 * 64;

    if (bytes <= compute->workspace_bytes)
        return compute->workspace;
    free(compute->workspace);
    compute->workspace = rounded >= bytes ? aligned_alloc(64, rounded) : NULL;
    compute->workspace_bytes = compute->workspace != NULL ? rounded : 0;
    return compute->workspace;
}

void kvp_compute_release(kvp_compute *compute)
{
    free(compute->workspace);
    free(compute->masks);
    free(compute->table);
    kvp_host_threads_release(&compute->host_threads);
    if (compute->cpu != NULL)
        kvp_api.backend_free(compute->cpu);
    *compute = (kvp_compute){ 0 };
}

/* library.c - the mock device (../host/host.h) with kernels of src/cuda in place of the mock's
 * loops, wherever this library has kernels. */
#include "../host/internal.h"

KVANT_API kvant_cuda_table_get_fn kvant_cuda_table_get;

const kvant_cuda_table *kvant_cuda_table_get(void)
{
    kvant_cuda_table *table = host_table();
    table->append = kvant_cuda_table_append;
    table->seal = kvant_cuda_table_seal;
    table->seal_rows = kvant_cuda_table_seal_rows;
    table->transform_queries = kvant_cuda_table_transform_queries;
    table->compact = kvant_cuda_table_compact;
    table->expand = kvant_cuda_table_expand;
    table->place_centers = kvant_cuda_table_place_centers;
    table->center_rows = kvant_cuda_table_center_rows;
    table->page_offsets = kvant_cuda_table_page_offsets;
    table->fill_marked = kvant_cuda_table_fill_marked;
    table->limit_shared_memory = kvant_cuda_table_limit_shared_memory;
    return table;
}

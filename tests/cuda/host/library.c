/* library.c - the only symbol of libkvant_cuda, in the mock device (host.h). */
#include "internal.h"

KVANT_API kvant_cuda_table_get_fn kvant_cuda_table_get;

const kvant_cuda_table *kvant_cuda_table_get(void)
{
    return host_table();
}

/* table.h - the functions in libkvant's table (device/cuda_table.h): kvant_cuda_table_<name>, not
 * exported. */
#ifndef KVANT_CUDA_TABLE_H
#define KVANT_CUDA_TABLE_H

#include "../device/cuda_table.h"
#include "params.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KVANT_CUDA_TABLE_DECLARE(result, name, parameters) result kvant_cuda_table_##name parameters;
KVANT_CUDA_TABLE_FUNCTIONS(KVANT_CUDA_TABLE_DECLARE)
#undef KVANT_CUDA_TABLE_DECLARE

#ifdef __cplusplus
}
#endif

#endif

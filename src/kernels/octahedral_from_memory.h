/* octahedral_from_memory.h - definitions for chunk_dots_template.h on levels that load the entries
 * of triplets and never compute them. Included before the template. */
#define CAN_COMPUTE false

typedef struct octahedral_table {
    int unused;
} octahedral_table;

#define load_octahedral(p) ((octahedral_table){ 0 })
#define compute_triplets(table, bits, codes, x) ((void)(x))

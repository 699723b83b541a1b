/* What a lowered kernel needs beside itself: bf16 rounding, strided copies, tile memory, and a note of a fault's address. */
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int64_t rank;
    void *descriptor;
} Unranked;

float __truncsfbf2(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000)
        bits |= 0x400000;
    else
        bits += 0x7fff + ((bits >> 16) & 1);
    bits >>= 16;
    memcpy(&x, &bits, 4);
    return x;
}

void memrefCopy(int64_t item, Unranked *source, Unranked *target) {
    /* A descriptor: allocated, aligned, offset, sizes, strides. */
    int64_t rank = source->rank, index[8] = {0};
    int64_t *from = source->descriptor, *to = target->descriptor;
    int64_t *sizes = from + 3, *from_strides = from + 3 + rank, *to_strides = to + 3 + rank;
    char *from_base = (char *)from[1] + from[2] * item, *to_base = (char *)to[1] + to[2] * item;
    for (int64_t i = 0; i < rank; i++)
        if (sizes[i] <= 0) return;
    for (;;) {
        int64_t a = 0, b = 0, i = rank - 1;
        for (int64_t j = 0; j < rank; j++) a += index[j] * from_strides[j], b += index[j] * to_strides[j];
        memcpy(to_base + b * item, from_base + a * item, item);
        while (i >= 0 && ++index[i] == sizes[i]) index[i--] = 0;
        if (i < 0) return;
    }
}

/* Tiles: NaN in every float type before their first write; nothing frees them one by one, so all at a program's end. */
typedef struct Tile {
    struct Tile *next;
    char data[] __attribute__((aligned(64)));
} Tile;
static Tile *tiles;

void *_mlir_memref_to_llvm_aligned_alloc(uint64_t alignment, uint64_t size) {
    size = (size + 63) / 64 * 64;
    if (alignment > 64) abort();
    Tile *tile = aligned_alloc(64, sizeof(Tile) + size);
    if (!tile) abort();
    memset(tile->data, 0xff, size);
    tile->next = tiles;
    tiles = tile;
    return tile->data;
}
void *_mlir_memref_to_llvm_alloc(uint64_t size) { return _mlir_memref_to_llvm_aligned_alloc(64, size); }
void _mlir_memref_to_llvm_free(void *data) { (void)data; }
void end_program(void) {
    while (tiles) {
        Tile *next = tiles->next;
        free(tiles);
        tiles = next;
    }
}

static volatile int64_t *fault_address;
static void note_fault(int number, siginfo_t *info, void *context) {
    (void)context;
    *fault_address = (int64_t)info->si_addr;
    signal(number, SIG_DFL);
    raise(number);
}
void note_faults_at(int64_t *address) {
    struct sigaction action = {.sa_sigaction = note_fault, .sa_flags = SA_SIGINFO};
    fault_address = address;
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
}

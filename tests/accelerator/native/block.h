// Settings, and the blocks of device memory with what is known about them.
#pragma once
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace fake {

inline std::atomic<bool> report_syncs{false};  // hidden waits of the host for the device

// Objects that threads may use while the process ends are allocated once and never destroyed: the destructor of a
// condition variable waits for its waiters, without end.

// One earlier access to a range of bytes of a block.
struct Access {
  int stream;
  uint64_t number;
  size_t begin, end;
  bool write;
  std::string task;
};

// A piece of device memory. It lives until it was freed and no queued task uses it.
class Block {
 public:
  Block(size_t size, int stream)
      : data((char*)std::aligned_alloc(64, (size + 64) / 64 * 64)), size(size), stream(stream) {}
  ~Block() { std::free(data); }

  // Why the contents must not be used; empty if they may be.
  std::string garbage() {
    std::lock_guard<std::mutex> lock(mutex_);
    return garbage_;
  }
  void set_garbage(std::string why) {
    std::lock_guard<std::mutex> lock(mutex_);
    garbage_ = std::move(why);
  }

  char* const data;
  const size_t size;
  const int stream;               // that it was allocated on
  std::vector<Access> accesses;   // those that a new access may still race with
  std::set<int> recorded;         // streams named by `record_stream`

 private:
  std::string garbage_;
  std::mutex mutex_;
};
using BlockPtr = std::shared_ptr<Block>;

}  // namespace fake

// Settings, and the blocks of device memory with what is known about them.
#pragma once
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace fake {

enum Mode { kOff = 0, kRecord = 1, kRaise = 2 };
inline std::atomic<int> sync_mode{kOff};     // hidden waits of the host for the device
inline std::atomic<int> race_mode{kRaise};   // accesses that no stream dependency orders
inline std::atomic<bool> poison{true};       // fill new memory, freed memory and targets of copies with 0xFF (NaN)
inline std::atomic<bool> protect{false};     // only the device's threads may touch device memory

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

// Pages by size, to be used again: mapping memory is slow under some sandboxes.
class PagePool {
 public:
  char* take(size_t size) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto& pages = free_[size];
      if (!pages.empty()) {
        char* page = pages.back();
        pages.pop_back();
        return page;
      }
    }
    void* page = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(page != MAP_FAILED, "fake: out of memory");
    return (char*)page;
  }

  void give(char* page, size_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_[size].push_back(page);
  }

 private:
  std::mutex mutex_;
  std::map<size_t, std::vector<char*>> free_;
};
inline PagePool& pages = *new PagePool;

// A piece of device memory. It lives until it was freed and no queued task uses it.
class Block {
 public:
  Block(size_t size, int stream) : size(size), stream(stream) {
    while (mapped_ < size) mapped_ *= 2;
    data = pages.take(mapped_);
  }
  ~Block() {
    if (guarded_) mprotect(data, mapped_, PROT_READ | PROT_WRITE);
    pages.give(data, mapped_);
  }

  // Make the pages inaccessible except between `open` and `close`.
  void guard() {
    guarded_ = true;
    mprotect(data, mapped_, PROT_NONE);
  }
  void open() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (guarded_ && users_++ == 0) mprotect(data, mapped_, PROT_READ | PROT_WRITE);
  }
  void close() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (guarded_ && --users_ == 0) mprotect(data, mapped_, PROT_NONE);
  }

  // Why the contents must not be used; empty if they may be.
  std::string garbage() {
    std::lock_guard<std::mutex> lock(mutex_);
    return garbage_;
  }
  void set_garbage(std::string why) {
    std::lock_guard<std::mutex> lock(mutex_);
    garbage_ = std::move(why);
  }

  char* data;
  const size_t size;
  const int stream;               // that it was allocated on
  std::vector<Access> accesses;   // those that a new access may still race with
  std::set<int> recorded;         // streams named by `record_stream`

 private:
  size_t mapped_ = 4096;
  bool guarded_ = false;
  int users_ = 0;
  std::string garbage_;
  std::mutex mutex_;
};
using BlockPtr = std::shared_ptr<Block>;

}  // namespace fake

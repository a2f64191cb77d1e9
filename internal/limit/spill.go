package limit

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
)

// spill keeps lines in a file, at most so many bytes, and gives them back from
// its end. What it gave it does not have any more: after a crash a line may be
// lost, none comes twice.
type spill struct {
	mu   sync.Mutex
	file *os.File // nil: keeps nothing
	size int64
	most int64
}

// chunk is how much is read at once.
const chunk = 256 << 10

// openSpill continues with what the file has; an empty path keeps nothing.
func openSpill(path string, most int64) (*spill, error) {
	s := &spill{most: most}
	if path == "" {
		return s, nil
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open spill file: %w", err)
	}
	if s.size, err = f.Seek(0, io.SeekEnd); err != nil {
		return nil, errors.Join(fmt.Errorf("open spill file: %w", err), f.Close())
	}
	s.file = f
	return s, nil
}

// push reports whether there was room. A line has no line feed.
func (s *spill) push(line []byte) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.file == nil || len(line) >= chunk/2 || s.size+int64(len(line))+1 > s.most {
		return false
	}
	n, err := s.file.WriteAt(append(line, '\n'), s.size)
	if err != nil {
		_ = s.file.Truncate(s.size) // a part of a line would spoil the next one
		return false
	}
	s.size += int64(n)
	return true
}

// pop takes the last lines out of the file, none if it is empty.
func (s *spill) pop() ([][]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.file == nil || s.size == 0 {
		return nil, nil
	}
	begin := max(0, s.size-chunk)
	data := make([]byte, s.size-begin)
	if _, err := s.file.ReadAt(data, begin); err != nil {
		return nil, fmt.Errorf("read spill file: %w", err)
	}
	if begin > 0 {
		// The first line is whole only behind a line feed.
		cut := bytes.IndexByte(data, '\n') + 1
		begin, data = begin+int64(cut), data[cut:]
	}
	if err := s.file.Truncate(begin); err != nil {
		return nil, fmt.Errorf("shorten spill file: %w", err)
	}
	s.size = begin
	return bytes.Split(bytes.TrimSuffix(data, []byte{'\n'}), []byte{'\n'}), nil
}

func (s *spill) empty() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.size == 0
}

func (s *spill) close() error {
	if s.file == nil {
		return nil
	}
	return s.file.Close()
}

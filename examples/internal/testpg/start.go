package testpg

// Start starts a server for a program that is not a test: its connection string,
// and what stops it. The server ends with the program, however that ends.
func Start() (dsn string, stop func(), err error) {
	s, err := start()
	if err != nil {
		return "", nil, err
	}
	return s.url, s.stop, nil
}

"""Tables, pictures, volumes and DICOM series as items and pixels."""
